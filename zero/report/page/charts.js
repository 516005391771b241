// Draws the curves of report.html with uPlot: each panel a chart, all with one cursor and one kind of x-axis.
"use strict";
(() => {
  const page = JSON.parse(document.getElementById("curves").textContent);
  const dashes = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
  const axes = {step: "step", tokens: "tokens", hours: "hours", flops: "FLOPs (6 × parameters × tokens)"};
  const charts = [];

  // The state of the page, which a reload keeps: #x=tokens&reload=off
  const state = new URLSearchParams(location.hash.slice(1));
  function remember(name, value) {
    state.set(name, value);
    history.replaceState(null, "", "#" + state);
  }

  // The x of a step of a run; hours lie on lines between the logged ones.
  function place(run, kind, step) {
    if (kind === "step") return step;
    if (kind === "tokens") return step * run.tokens_per_step;
    if (kind === "flops") return step * run.tokens_per_step * 6 * run.parameters;
    const [steps, hours] = run.hours;
    let last = steps.findIndex((other) => other >= step);
    if (last === -1) last = steps.length - 1;
    if (last === 0 || steps[last] === step) return hours[last];
    const share = (step - steps[last - 1]) / (steps[last] - steps[last - 1]);
    return hours[last - 1] + share * (hours[last] - hours[last - 1]);
  }

  // Whether a panel shows several runs: a color is a run then, and else a metric.
  function isShared(panel) {
    return page.runs.length > 1 && panel.run === null;
  }

  // The curves of a panel: those of each run, with the style and the text of the key.
  function seriesOf(panel) {
    const several = isShared(panel);
    const series = [];
    for (const [index, run] of page.runs.entries()) {
      if (panel.run !== null && panel.run !== index) continue;
      for (const [number, [metric, label]] of panel.curves.entries()) {
        if (!(metric in run.curves)) continue;
        const [steps, values] = run.curves[metric];
        const hue = several ? index : number;
        const name = !several ? label : panel.curves.length > 1 ? `${run.name}: ${label}` : run.name;
        series.push({index, run, metric, label: name, hue: `--c${hue % 8}`, dash: dashes[(panel.run === null ? number : Math.floor(number / 8)) % 4], steps, values,
          inKey: !several || number === 0});
      }
    }
    return series;
  }

  function draw(panel, holder) {
    const plot = holder.querySelector(".plot");
    const key = holder.querySelector(".key");
    const series = seriesOf(panel);
    let chart = null;
    let values = [];

    function showKey(index) {
      for (const [number, one] of series.entries()) {
        if (!values[number]) continue;
        const column = chart.data[number + 1];
        let at = index === null || index === undefined ? column.length - 1 : index;
        while (at > 0 && (column[at] === undefined || (index === null && column[at] === null))) at -= 1;
        values[number].textContent = readable(column[at]);
      }
    }

    function build(kind) {
      if (chart !== null) chart.destroy();
      const tables = series.map((one) => [one.steps.map((step) => place(one.run, kind, step)), one.values]);
      const grid = {stroke: color("--line"), width: 1};
      const axis = {stroke: color("--quiet"), grid, ticks: grid, font: "12px system-ui, sans-serif"};
      const vertical = (u) => {
        u.ctx.save();
        u.ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
        u.ctx.lineWidth = devicePixelRatio;
        for (const [index, run] of page.runs.entries()) {
          u.ctx.strokeStyle = page.runs.length > 1 ? color(`--c${index % 8}`) : color("--quiet");
          for (const step of run.resumes) {
            const x = u.valToPos(place(run, kind, step), "x", true);
            if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
            u.ctx.beginPath();
            u.ctx.moveTo(x, u.bbox.top);
            u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
            u.ctx.stroke();
          }
        }
        u.ctx.restore();
      };
      const options = {
        width: Math.max(plot.clientWidth, 100),
        height: plot.clientHeight,
        padding: [8, 12, 0, 0],
        legend: {show: false},
        cursor: {sync: {key: "runs"}, focus: {prox: 24}},
        scales: {
          x: {time: false},
          y: panel.is_logarithmic ? {distr: 3} : panel.from_zero ? {range: (u, low, high) => [Math.min(0, low), (high || 1) * 1.05]} : {},
        },
        axes: [
          {...axis, grid: {show: false}, label: axes[kind], labelSize: 18, labelFont: axis.font, size: 34,
            values: (u, ticks) => ticks.map(readable)},
          {...axis, size: 58, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : readable(tick)))},
        ],
        series: [{}, ...series.map((one) => ({
          label: one.label,
          stroke: color(one.hue),
          width: 1.75,
          dash: one.dash,
          show: one.run.shown !== false,
          paths: panel.is_stepped ? uPlot.paths.stepped({align: -1}) : undefined,
          points: {show: panel.points.includes(one.metric) || one.steps.length === 1, size: 6},
        }))],
        hooks: {draw: [vertical], setCursor: [(u) => showKey(u.cursor.idx)]},
      };
      chart = new uPlot(options, uPlot.join(tables), plot);
      showKey(null);
    }

    key.replaceChildren();
    const listed = series.filter((one) => one.inKey);
    const more = isShared(panel) ? panel.curves.slice(1) : [];
    values = series.map((one) => {
      if (!one.inKey) return null;
      const item = document.createElement("li");
      item.innerHTML = swatch(`var(${one.hue})`, one.dash);
      text(item, "span", one.label);
      const value = text(item, "b", "");
      key.append(item);
      return value;
    });
    for (const [number, [metric, label]] of more.entries()) {
      if (!page.runs.some((run) => metric in run.curves)) continue;
      const item = document.createElement("li");
      item.innerHTML = swatch("var(--quiet)", dashes[(number + 1) % 4]);
      text(item, "span", label);
      key.append(item);
    }
    build(state.get("x") || "step");

    plot.addEventListener("keydown", (event) => {
      const last = chart.data[0].length - 1;
      const at = chart.cursor.idx ?? last;
      const next = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last}[event.key];
      if (next === undefined) return;
      event.preventDefault();
      const index = Math.min(Math.max(next, 0), last);
      chart.setCursor({left: chart.valToPos(chart.data[0][index], "x"), top: 10});
      const said = listed.map((one) => `${one.label} ${values[series.indexOf(one)].textContent}`).join(", ");
      const x = readable(chart.data[0][index]);
      document.getElementById("said").textContent = `${panel.title}, ${axes[state.get("x") || "step"]} ${x}: ${said}`;
    });
    new ResizeObserver(() => chart.setSize({width: Math.max(plot.clientWidth, 100), height: plot.clientHeight})).observe(plot);
    charts.push({build, show: (index, shown) => series.forEach((one, number) => {
      if (one.index === index) chart.setSeries(number + 1, {show: shown});
    })});
  }

  // A heat map: a color per layer and step, from the lowest to the highest value of all maps.
  function heat(map, canvas) {
    const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
    const [low, high] = page.heat.range;
    canvas.width = map.values[0].length;
    canvas.height = map.values.length;
    const context = canvas.getContext("2d");
    map.values.forEach((row, layer) => row.forEach((value, column) => {
      if (value === null) return;
      const t = Math.min(Math.max((value - low) / (high - low || 1), 0), 1) * (stops.length - 1);
      const first = Math.min(Math.floor(t), stops.length - 2);
      const mix = stops[first].map((part, i) => Math.round(part + (t - first) * (stops[first + 1][i] - part)));
      context.fillStyle = `rgb(${mix.join(",")})`;
      context.fillRect(column, map.values.length - 1 - layer, 1, 1);
    }));
    canvas.addEventListener("mousemove", (event) => {
      const column = Math.floor(event.offsetX / canvas.clientWidth * canvas.width);
      const layer = map.values.length - 1 - Math.floor(event.offsetY / canvas.clientHeight * canvas.height);
      const value = (map.values[layer] || [])[column];
      if (value !== undefined) canvas.title = `step ${map.steps[column]}, layer ${layer}: 10^${readable(value)}`;
    });
  }

  // The last loss of each run against a swept key.
  function drawSweep(sweep, holder) {
    const plot = holder.querySelector(".plot");
    const key = holder.querySelector(".key");
    const tables = sweep.lines.map((line) => [line.points.map((point) => point[0]), line.points.map((point) => point[1])]);
    const build = () => {
      plot.replaceChildren();
      const grid = {stroke: color("--line"), width: 1};
      const axis = {stroke: color("--quiet"), grid, ticks: grid, font: "12px system-ui, sans-serif"};
      const ticks = [...new Set(tables.flatMap((table) => table[0]))].sort((a, b) => a - b);
      return new uPlot({
        width: Math.max(plot.clientWidth, 100),
        height: plot.clientHeight,
        padding: [8, 24, 0, 0],
        legend: {show: false},
        scales: {x: {time: false, distr: 3, range: [ticks[0] / 1.2, ticks[ticks.length - 1] * 1.2]}},
        axes: [
          {...axis, grid: {show: false}, label: sweep.key, labelSize: 18, labelFont: axis.font, size: 34, splits: () => ticks,
            values: (u, splits) => splits.map(readable), filter: (u, splits) => splits},
          {...axis, size: 58, values: (u, splits) => splits.map(readable)},
        ],
        series: [{}, ...sweep.lines.map((line, number) => ({
          label: line.name, stroke: color(`--c${number % 8}`), width: 1.75, points: {show: true, size: 7},
          dash: dashes[Math.floor(number / 8) % 4],
        }))],
      }, uPlot.join(tables), plot);
    };
    sweep.lines.forEach((line, number) => {
      const item = document.createElement("li");
      item.innerHTML = swatch(`var(--c${number % 8})`, dashes[Math.floor(number / 8) % 4]);
      text(item, "span", line.name);
      key.append(item);
    });
    let chart = build();
    new ResizeObserver(() => chart.setSize({width: Math.max(plot.clientWidth, 100), height: plot.clientHeight})).observe(plot);
    charts.push({build: () => { chart = build(); }, show: () => {}});
  }

  for (const [number, panel] of page.panels.entries()) draw(panel, document.getElementById(`panel-${number}`));
  if (page.sweep) drawSweep(page.sweep, document.getElementById("sweep"));
  if (page.heat) page.heat.maps.forEach((map, number) => heat(map, document.getElementById(`heat-${number}`)));

  const chosen = state.get("x") || "step";
  for (const input of document.querySelectorAll("input[name=x]")) {
    input.checked = input.value === chosen;
    input.addEventListener("change", () => {
      remember("x", input.value);
      charts.forEach((chart) => chart.build(input.value));
    });
  }
  for (const input of document.querySelectorAll("input[name=run]")) {
    const index = Number(input.value);
    const hidden = (state.get("hidden") || "").split(",");
    input.checked = !hidden.includes(input.value);
    page.runs[index].shown = input.checked;
    if (!input.checked) charts.forEach((chart) => chart.show(index, false));
    input.addEventListener("change", () => {
      page.runs[index].shown = input.checked;
      const all = [...document.querySelectorAll("input[name=run]")];
      remember("hidden", all.filter((one) => !one.checked).map((one) => one.value).join(","));
      charts.forEach((chart) => chart.show(index, input.checked));
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    charts.forEach((chart) => chart.build(state.get("x") || "step")));

  // How long ago the newest line was logged, and a reload from time to time while the run goes on.
  const age = document.getElementById("age");
  if (age) {
    const minutes = Math.round((Date.now() / 1000 - Number(age.dataset.time)) / 60);
    if (minutes >= 2) {
      const hours = Math.round(minutes / 60);
      age.textContent = `; the newest line is ${minutes < 120 ? `${minutes} minutes` : `${hours} hours`} old`;
    }
  }
  const reload = document.getElementById("reload");
  if (reload) {
    let timer = null;
    const start = () => { timer = setTimeout(() => location.reload(), 1000 * Number(reload.dataset.seconds)); };
    reload.checked = state.get("reload") !== "off";
    if (reload.checked) start();
    reload.addEventListener("change", () => {
      remember("reload", reload.checked ? "on" : "off");
      clearTimeout(timer);
      if (reload.checked) start();
    });
  }
})();
