// The chart of a run, with zoom: uPlot draws the curves from the JSON of the page, and everything else on the axis of steps moves along.
"use strict";
(() => {
  const state = { record: null, low: null, high: null };
  let plots = [];
  const figure = () => document.getElementById("chart");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const ends = () => [Number(figure().dataset.first), Number(figure().dataset.last) + 1];
  const grouped = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 4 }).replaceAll(",", "\u202f");
  const short = (value) => (value == null ? "–" : Number(value.toPrecision(4)).toString());

  const dataOf = (series, name) => [
    series.first.map((first, index) => (first + series.last[index] + 1) / 2), series[name], series[`${name}_low`], series[`${name}_high`],
  ];

  // The library divides the span of the values into round parts, which it cannot where that is out of all bounds: the server's figure stays.
  function drawable(series, name) {
    const known = [name, `${name}_low`, `${name}_high`].flatMap((one) => series[one]).filter((value) => value != null);
    const low = known.reduce((one, other) => Math.min(one, other), Infinity), high = known.reduce((one, other) => Math.max(one, other), -Infinity);
    return known.length === 0 || (Math.max(Math.abs(low), Math.abs(high)) < 1e300 && (high === low || high - low > 1e-300));
  }

  function breaks(plot, series) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour("--bad");
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 2 * devicePixelRatio]);
    series.nonfinite.forEach((count, index) => {
      if (!(count > 0)) return;
      const x = plot.valToPos(series.first[index], "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) return;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    });
    ctx.restore();
  }

  function build(panel, name, title) {
    const series = state.record.series;
    const plot = panel.querySelector(".plot");
    const labels = plot.offsetLeft - panel.offsetLeft;
    const accent = colour("--accent"), faint = colour("--faint"), line = colour("--line");
    const options = {
      width: plot.clientWidth + labels, height: plot.clientHeight, padding: [6, 0, 6, 0], legend: { show: false },
      cursor: { sync: { key: "run" }, drag: { x: true, y: false }, points: { show: false }, y: false },
      scales: { x: { time: false, range: (_, low, high) => [low, high] } },
      axes: [
        { show: false },
        { size: labels, gap: 6, stroke: faint, font: "11px system-ui", grid: { stroke: line, width: 1 }, ticks: { show: false }, values: (_, values) => values.map((value) => (value == null ? "" : short(value))) },
      ],
      series: [{}, { stroke: accent, width: 1.6, points: { show: false } }, { stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } }],
      bands: [{ series: [3, 2], fill: `${accent}2e` }],
      hooks: {
        draw: [(one) => breaks(one, series)],
        setScale: [(one, key) => { if (key === "x") moved(one.scales.x.min, one.scales.x.max, one); }],
        setCursor: [(one) => {
          const index = one.cursor.idx;
          if (index == null || one.cursor.event == null) return;
          const range = series.first[index] === series.last[index] ? grouped(series.first[index]) : `${grouped(series.first[index])} to ${grouped(series.last[index])}`;
          const values = one.data.slice(1).map((column) => short(column[index]));
          const place = figure().querySelector("[data-told]");
          place.setAttribute("aria-live", "off");
          place.textContent = `step ${range}: ${title} ${values[0]} (${values[1]} to ${values[2]})`;
        }],
      },
    };
    const made = new uPlot(options, dataOf(series, name), plot);
    made.root.style.left = `${-labels}px`;
    made.root.setAttribute("aria-hidden", "true");
    panel.classList.add("live-plot");
    return made;
  }

  let moving = false;
  function moved(low, high, source) {
    if (moving || low == null) return;
    moving = true;
    const [first, end] = ends();
    const whole = low <= first && high >= end;
    state.low = whole ? null : low;
    state.high = whole ? null : high;
    for (const plot of plots) if (plot !== source) plot.setScale("x", { min: low, max: high });
    place(low, high);
    moving = false;
  }

  function place(low, high) {
    const at = (step) => ((step - low) / (high - low)) * 100;
    for (const node of document.querySelectorAll(".lanes [data-first], .cells [data-first]")) {
      const first = Number(node.dataset.first);
      if (node.classList.contains("flag")) {
        const x = at(first);
        node.setAttribute("x", `${Math.min(Math.max(x, 0.6), 99.4)}%`);
        node.setAttribute("visibility", x < 0 || x > 100 ? "hidden" : "visible");
        continue;
      }
      const from = Math.max(at(first), 0), to = Math.min(at(Number(node.dataset.last) + 1), 100);
      node.setAttribute("x", `${from}%`);
      node.setAttribute("width", `${Math.max(to - from, 0)}%`);
    }
    const span = high - low, power = 10 ** Math.floor(Math.log10(span / 5));
    const size = Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= span / 5) ?? 10 * power);
    for (const axis of document.querySelectorAll(".chart .steps-axis, .ledger .steps-axis")) {
      const parts = [];
      for (let step = Math.ceil(low / size) * size; step <= high - 1 + 1e-9; step += size) {
        const x = at(step);
        const group = document.createElementNS("http://www.w3.org/2000/svg", "g");
        const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
        const text = document.createElementNS("http://www.w3.org/2000/svg", "text");
        group.setAttribute("class", "tick");
        for (const [name, value] of Object.entries({ x1: `${x}%`, x2: `${x}%`, y1: 0, y2: 4 })) line.setAttribute(name, value);
        for (const [name, value] of Object.entries({ x: `${x}%`, y: 15, "text-anchor": x < 3 ? "start" : x > 96 ? "end" : "middle" })) text.setAttribute(name, value);
        text.textContent = grouped(step);
        group.append(line, text);
        parts.push(group);
      }
      axis.replaceChildren(...parts);
    }
  }

  function draw() {
    for (const plot of plots) plot.destroy();
    plots = [];
    const here = figure();
    if (!here) return;
    const [first, end] = ends();
    const [low, high] = [state.low ?? first, state.high ?? end];
    if (state.low != null) place(low, high);
    if (!state.record?.series?.first?.length || !here.querySelector("[data-panel]")) return;
    const wanted = [["loss", "loss"], ["norm", "gradient norm"]].map((one, index) => [...one, index]);
    plots = wanted.filter(([name]) => drawable(state.record.series, name)).map(([name, title, index]) => build(here.querySelector(`[data-panel="${index}"]`), name, title));
    for (const plot of plots) plot.setScale("x", { min: low, max: high });
  }

  async function load() {
    const twin = document.body.dataset.twin;
    if (!figure() || !twin || !window.uPlot) return;
    try {
      const answer = await fetch(twin, { headers: { accept: "application/json" }, credentials: "same-origin" });
      if (!answer.ok) return;
      state.record = await answer.json();
    } catch { return; }   // the figure of the server is still there
    draw();
  }

  document.addEventListener("click", (event) => {
    const kind = event.target.closest?.("[data-zoom]")?.dataset.zoom;
    if (!kind || !figure()) return;
    const [first, end] = ends();
    let [low, high] = [state.low ?? first, state.high ?? end];
    const span = high - low, middle = (low + high) / 2;
    if (kind === "in" && span > 2) [low, high] = [middle - span / 4, middle + span / 4];
    if (kind === "out") [low, high] = [middle - span, middle + span];
    if (kind === "left" || kind === "right") {
      const by = Math.max(Math.min((kind === "left" ? -1 : 1) * span / 2, end - high), first - low);
      [low, high] = [low + by, high + by];
    }
    if (kind === "all") [low, high] = [first, end];
    [low, high] = [Math.max(low, first), Math.min(high, end)];
    if (plots.length) plots[0].setScale("x", { min: low, max: high });
    else { state.low = low; state.high = high; place(low, high); }
  });
  document.addEventListener("bitwitness:redrawn", () => { draw(); load(); });
  document.addEventListener("bitwitness:recoloured", draw);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
  load();
})();
