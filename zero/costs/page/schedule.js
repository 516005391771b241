// Draws the schedule of each program: lanes of blocks, a zoom, and the text of the block under the pointer.
"use strict";
const LANE_HEIGHT = 34;

function draw_schedule(section) {
  const data = JSON.parse(section.querySelector("script").textContent);
  const canvas = section.querySelector("canvas");
  const shown = section.querySelector("output");
  let first = 0;
  let width = 1; // the part of the step that is visible
  let chosen = null;

  function clamp() {
    width = Math.min(1, Math.max(1e-5, width));
    first = Math.min(1 - width, Math.max(0, first));
  }

  function draw() {
    const scale = window.devicePixelRatio || 1;
    const size = canvas.clientWidth;
    canvas.style.height = `${data.lanes.length * LANE_HEIGHT}px`;
    canvas.width = size * scale;
    canvas.height = data.lanes.length * LANE_HEIGHT * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const colors = ["--c0", "--c1", "--c2", "--c3"].map(color);
    for (const block of data.blocks) {
      const [lane, begin, length, does] = block;
      const x = (begin - first) / width * size;
      const wide = length / width * size;
      if (x + wide < 0 || x > size) continue;
      context.fillStyle = colors[does];
      context.globalAlpha = block === chosen ? 1 : 0.75;
      const gap = wide > 4 ? 0.5 : 0;
      context.fillRect(x, lane * LANE_HEIGHT + 14, Math.max(wide - gap, 0.4), LANE_HEIGHT - 16);
    }
    context.globalAlpha = 1;
    context.fillStyle = color("--ink");
    context.font = "11px system-ui, sans-serif";
    data.lanes.forEach((name, lane) => context.fillText(name, 4, lane * LANE_HEIGHT + 11));
    const to = Math.min(1, first + width);
    const times = `${readable(1e3 * first * data.seconds)} to ${readable(1e3 * to * data.seconds)} ms`;
    context.textAlign = "right";
    context.fillText(times, size - 4, 11);
  }

  function under(event) {
    const box = canvas.getBoundingClientRect();
    const lane = Math.floor((event.clientY - box.top) / LANE_HEIGHT);
    const at = first + (event.clientX - box.left) / box.width * width;
    const near = 2 / box.width * width; // blocks of less than a pixel can be pointed at
    let best = null;
    for (const block of data.blocks) {
      if (block[0] !== lane || at < block[1] - near || at > block[1] + block[2] + near) continue;
      if (best === null || block[2] < best[2]) best = block;
    }
    return best;
  }

  function zoom(factor, at) {
    const middle = first + at * width;
    width = factor === 0 ? 1 : width / factor;
    clamp();
    first = middle - at * width;
    clamp();
    draw();
  }

  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = event.clientX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (held !== null) {
      first -= (event.clientX - held) / canvas.clientWidth * width;
      held = event.clientX;
      clamp();
    }
    chosen = under(event);
    shown.textContent = chosen === null ? " " : chosen[4];
    draw();
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && Math.abs(event.deltaX) > Math.abs(event.deltaY)) return;
    event.preventDefault();
    zoom(event.deltaY < 0 ? 1.25 : 0.8, event.offsetX / canvas.clientWidth);
  }, {passive: false});
  for (const button of section.querySelectorAll("button")) {
    button.addEventListener("click", () => zoom(Number(button.dataset.zoom), 0.5));
  }
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}

document.querySelectorAll(".schedule").forEach(draw_schedule);
