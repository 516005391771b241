// Draws the histogram of lengths with uPlot: bars over logarithmic axes, which the arrow keys read.
"use strict";
(() => {
  const holder = document.getElementById("lengths");
  if (!holder) return;
  const {bins, counts} = JSON.parse(document.getElementById("histogram").textContent);
  const plot = holder.querySelector(".plot");
  const said = document.getElementById("said");
  const first = counts[0][0];
  const last = counts[counts.length - 1][0];
  const found = new Map(counts);
  const numbers = Array.from({length: last - first + 1}, (_, place) => first + place);
  const documents = numbers.map((number) => found.get(number) || 0);
  const lowest = 0.5; // of the axis: a bar of one document is seen
  const whole = (u, ticks) => ticks.map((tick) => tick >= 1 ? tick : null);
  const heights = documents.map((count) => count || null);
  const tokens = (number) => Math.round(2 ** (number / bins));

  function say(place) {
    if (place === null || place === undefined) return;
    const range = `${tokens(numbers[place]).toLocaleString("en")} to ${tokens(numbers[place] + 1).toLocaleString("en")} tokens`;
    said.textContent = `${range}: ${documents[place].toLocaleString("en")} documents`;
  }

  function build() {
    const grid = {stroke: color("--line"), width: 1};
    const axis = {stroke: color("--quiet"), grid, ticks: grid, font: "12px system-ui, sans-serif"};
    return new uPlot({
      width: Math.max(plot.clientWidth, 100),
      height: plot.clientHeight,
      padding: [8, 28, 0, 0],  // half of the last label
      legend: {show: false},
      scales: {x: {time: false, range: () => [first - 1, last + 2]}, y: {distr: 3, range: (u, low, high) => [lowest, (high || 1) * 1.5]}},
      axes: [
        {...axis, grid: {show: false}, label: "tokens", labelSize: 18, labelFont: axis.font, size: 34, incrs: [1, 2, 3, 4, 5].map((n) => bins * n),
          values: (u, ticks) => ticks.map((tick) => tokens(tick).toLocaleString("en"))},
        {...axis, size: 58, grid: {...grid, filter: whole}, ticks: {...grid, filter: whole}, filter: whole,
          values: (u, ticks) => ticks.map((tick) => tick && [1, 2, 5].includes(tick / 10 ** Math.floor(Math.log10(tick))) ? readable(tick) : "")},
      ],
      series: [{}, {label: "documents", stroke: color("--c0"), fill: color("--c0"), fillTo: lowest, paths: uPlot.paths.bars({size: [0.9], align: 1}), points: {show: false}}],
      hooks: {setCursor: [(u) => say(u.cursor.idx)]},
    }, [numbers, heights], plot);
  }

  let chart = build();
  plot.addEventListener("keydown", (event) => {
    const end = numbers.length - 1;
    const at = chart.cursor.idx ?? end;
    const next = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: end}[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const place = Math.min(Math.max(next, 0), end);
    chart.setCursor({left: chart.valToPos(numbers[place], "x"), top: 10});
    say(place);
  });
  new ResizeObserver(() => chart.setSize({width: Math.max(plot.clientWidth, 100), height: plot.clientHeight})).observe(plot);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { chart.destroy(); chart = build(); });
})();
