// What the scripts of all pages use: colors of the style, readable numbers, keys of curves.
"use strict";
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function readable(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e15) return value.toExponential(2);
  for (const [unit, name] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e4, " k"]]) {
    if (size >= unit) return Number((value / (name === " k" ? 1e3 : unit)).toPrecision(4)) + name;
  }
  if (value !== 0 && size < 1e-3) return Number(value.toPrecision(3)).toExponential();  // 8e-4: short, as beside an axis
  return String(Number(value.toPrecision(4)));
}

function swatch(stroke, dash) {
  return `<svg class="swatch" viewBox="0 0 26 12" aria-hidden="true"><line x1="0" y1="6" x2="26" y2="6"
    stroke="${stroke}" stroke-width="2.5" stroke-dasharray="${dash.join(" ")}"/></svg>`;
}

function text(parent, tag, content) {
  const element = document.createElement(tag);
  element.textContent = content;
  parent.append(element);
  return element;
}
