(() => {
  "use strict";
  const $ = (id) => document.getElementById(id);
  const all = (query) => [...document.querySelectorAll(query)];
  const root = document.documentElement;
  const content = JSON.parse($("content").textContent);
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  // Plotly reads tags and entities in names, and would follow them.
  const safe = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (text, most) => safe(text.length > most ? `${text.slice(0, most - 1)}…` : text);
  root.classList.add("js");

  const paint = followTheme(() => draw());

  // ------------------------------------------------------------------ charts
  const options = { displaylogo: false, responsive: true, displayModeBar: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };
  function frame(more) {
    const grid = { gridcolor: colour("--grid"), zerolinecolor: colour("--muted"), linecolor: colour("--line"), automargin: true };
    return {
      margin: { l: 50, r: 14, t: 10, b: 46 }, showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--text"), family: "system-ui, sans-serif", size: 13 },
      hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--text") }, namelength: -1 },
      modebar: { color: colour("--muted"), activecolor: colour("--accent"), bgcolor: "rgba(0,0,0,0)" },
      ...more,
      xaxis: { ...grid, ...more.xaxis }, yaxis: { ...grid, ...more.yaxis },
    };
  }
  const show = (id, traces, layout) => Plotly.react($(id), traces, frame(layout), options);

  function drawErrors() {
    const errors = content.errors;
    show("errors", [{
      type: "bar", orientation: "h", y: errors.map((one) => short(one.name, 28)), x: errors.map((one) => one.error),
      text: errors.map((one) => one.error.toPrecision(4)), textposition: "auto",
      insidetextfont: { color: colour("--panel") }, outsidetextfont: { color: colour("--text") }, cliponaxis: false,
      marker: { color: errors.map((one) => colour(one.ours ? "--c0" : "--c1")) }, hovertemplate: "%{x:.5g}<extra></extra>",
    }], { margin: { l: 10, r: 20, t: 6, b: 30 }, yaxis: { autorange: "reversed" }, xaxis: { rangemode: "tozero" } });
  }

  const output = () => Number($("class")?.value ?? 0);
  const size = (one) => Math.hypot(...one.coefficients);
  const number = (value) => typeof value === "number" ? value : NaN;
  const orders = {
    size: (a, b) => size(b) - size(a),
    penalty: (a, b) => (number(a.penalty) || Infinity) - (number(b.penalty) || Infinity),
    name: (a, b) => a.name.localeCompare(b.name),
    table: () => 0,
  };
  function drawFeatures() {
    const sorted = [...content.features].sort(orders[$("order").value]).slice(0, Number($("many").value));
    $("how-many").textContent = `${sorted.length} of ${content.features.length} drawn`;
    const [on, off] = [colour("--c0"), colour("--panel")];
    // Places, not names: two long names may look alike when shortened.
    const y = sorted.map((_, i) => i);
    const names = sorted.map((one) => short(one.name, 26));
    const whole = sorted.map((one) => safe(one.name));
    const axis = { autorange: false, range: [sorted.length - 0.4, -0.6], tickvals: y, ticktext: names, showgrid: false, zeroline: false };
    const height = `${Math.max(8, 1.45 * sorted.length + 4)}rem`;
    for (const id of ["coefficients", "penalties"]) $(id).style.height = height;
    const layout = { margin: { l: 20, r: 16, t: 6, b: 36 }, yaxis: axis, hovermode: "y" };
    const hollow = { width: 1.5, color: on };
    show("coefficients", [{
      type: "bar", orientation: "h", y, x: sorted.map((one) => one.coefficients[output()]), customdata: whole,
      marker: { color: sorted.map((one) => one.off ? off : on), line: hollow }, hovertemplate: "%{customdata}: %{x:.5g}<extra></extra>",
    }], layout);
    const known = content.features.map((one) => number(one.penalty)).filter((value) => value > 0);
    if (content.shared > 0) known.push(content.shared);
    // Two decades at least, so that penalties that hardly differ do not look as if they did.
    const [least, most] = [Math.log10(Math.min(...known)), Math.log10(Math.max(...known))];
    const room = Math.max(0.2, (2 - (most - least)) / 2);
    const range = [least - room, most + room];
    const shared = content.shared > 0 ? [{ type: "line", x0: content.shared, x1: content.shared, y0: 0, y1: 1, yref: "paper", line: { color: colour("--c1"), dash: "dash", width: 2 } }] : [];
    show("penalties", [{
      type: "scatter", mode: "markers", y, x: sorted.map((one) => number(one.penalty) > 0 ? one.penalty : null),
      customdata: sorted.map((one) => [safe(one.name), (100 * one.shrinkage).toFixed(1)]),
      marker: { size: 11, color: sorted.map((one) => one.off ? off : on), line: hollow },
      hovertemplate: "%{customdata[0]}: α = %{x:.4g}, held to %{customdata[1]} %<extra></extra>",
    }], { ...layout, xaxis: { type: "log", exponentformat: "power", range, dtick: Math.ceil((range[1] - range[0]) / 6) }, shapes: shared });
    for (const id of ["coefficients", "penalties"]) Plotly.Plots.resize($(id));
  }

  function drawEffects() {
    content.effects.forEach((one, place) => {
      const found = one.outputs[Math.min(output(), one.outputs.length - 1)];
      const id = `effect-${place}`, layout = { margin: { l: 40, r: 10, t: 6, b: 30 } };
      const line = colour("--c0"), axis = { zeroline: true, zerolinelayer: "above traces" };
      if (one.shape === "pair") {
        const z = one.grid[1].map((_, j) => one.grid[0].map((_, i) => found.mean[i][j]));
        const [x, y] = one.grid.map((grid) => grid.map((value) => typeof value === "string" ? safe(value) : value));
        const scale = [[0, colour("--c0")], [0.5, colour("--panel")], [1, colour("--c1")]];
        const [across, up] = one.columns.map((name) => ({ title: { text: short(name, 26), font: { size: 12 } }, zeroline: false }));
        show(id, [{ type: "heatmap", x, y, z, zmid: 0, colorscale: scale, colorbar: { thickness: 10, tickfont: { size: 10 } },
          hovertemplate: "%{x}, %{y}: %{z:.4g}<extra></extra>" }], { ...layout, xaxis: across, yaxis: up });
      } else if (one.shape === "categories") {
        const size = one.grid.map((_, i) => found.high[i] - found.mean[i]);
        show(id, [{ type: "scatter", mode: "markers", x: found.mean, y: one.grid.map((name) => short(name, 18)), marker: { size: 9, color: line },
          error_x: { type: "data", array: size, color: line }, hovertemplate: "%{y}: %{x:.4g}<extra></extra>" }],
        { ...layout, xaxis: axis, yaxis: { type: "category" } });
      } else {
        const band = { type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
        const traces = [
          { ...band, x: one.grid, y: found.low },
          { ...band, x: one.grid, y: found.high, fill: "tonexty", fillcolor: colour("--soft") },
          { type: "scatter", mode: "lines", x: one.grid, y: found.mean, line: { color: line, width: 2.5 }, hovertemplate: "%{x:.5g}: %{y:.4g}<extra></extra>" },
        ];
        const last = one.grid.length - 1, beyond = one.grid[last] + 0.08 * (one.grid[last] - one.grid[0]);
        if (found.missing !== null) traces.push({ type: "scatter", mode: "markers+text", x: [beyond], y: [found.missing], text: ["missing"],
          textposition: "top left", textfont: { size: 10 }, marker: { symbol: "square", size: 10, color: colour("--c1") },
          hovertemplate: "missing: %{y:.4g}<extra></extra>" });
        show(id, traces, { ...layout, yaxis: axis });
      }
    });
  }

  function drawPoints() {
    const { points, classes } = content;
    const some = points.rows.length < points.of ? `${points.rows.length} of ${points.of} held-out rows` : `${points.of} held-out rows`;
    if (!classes.length) {
      const every = [...points.truth, ...points.predicted];
      const [low, high] = [Math.min(...every), Math.max(...every)];
      $("points-what").textContent = `${some}; on the line, a prediction is right`;
      show("points", [
        { type: "scatter", mode: "lines", x: [low, high], y: [low, high], line: { color: colour("--muted"), dash: "dash", width: 1.5 }, hoverinfo: "skip" },
        { type: "scatter", mode: "markers", x: points.truth, y: points.predicted, customdata: points.rows,
          marker: { size: 7, opacity: points.rows.length > 500 ? 0.4 : 0.7, color: colour("--c0") },
          hovertemplate: "row %{customdata}: true %{x:.5g}, predicted %{y:.5g}<extra></extra>" },
      ], { xaxis: { title: { text: `true ${short(content.target, 30)}` } }, yaxis: { title: { text: "predicted" } } });
    } else if (classes.length === 2) {
      const right = points.confusion[0][0] + points.confusion[1][1];
      $("points-what").textContent = `${some}, ${right} of ${points.of} right; the probability of ${classes[1]}, by true class`;
      const traces = classes.map((name, k) => ({
        type: "histogram", name: `true: ${short(name, 30)}`, x: points.predicted.filter((_, i) => points.truth[i] === k),
        xbins: { start: 0, end: 1.0001, size: 0.05 }, opacity: 0.75, marker: { color: colour(`--c${k}`) }, hovertemplate: "%{y} rows at %{x}",
      }));
      show("points", traces, { barmode: "stack", showlegend: true, legend: { orientation: "h", y: 1.15 }, margin: { l: 50, r: 14, t: 34, b: 46 },
        xaxis: { range: [0, 1], title: { text: `probability of ${short(classes[1], 30)}` } }, yaxis: { title: { text: "held-out rows" } } });
    } else {
      $("points-what").textContent = `${points.of} held-out rows by true and predicted class`;
      const names = classes.map((name) => short(name, 18));
      const axis = { tickvals: names.map((_, i) => i), ticktext: names, showgrid: false, zeroline: false };
      show("points", [{
        type: "heatmap", z: points.confusion, x: names.map((_, i) => i), y: names.map((_, i) => i), showscale: false, xgap: 2, ygap: 2,
        colorscale: [[0, colour("--soft")], [1, colour("--c0")]], text: points.confusion, texttemplate: classes.length <= 15 ? "%{text}" : "",
        hovertemplate: "%{z} held-out rows<extra></extra>",
      }], { xaxis: { ...axis, title: { text: "predicted" } }, yaxis: { ...axis, autorange: "reversed", title: { text: "true" } } });
    }
  }

  function drawHistory() {
    const { step, value, seconds, best } = content.history;
    // A line search may look at penalties that are far off; the axis is that of what was kept.
    const [low, high] = [Math.min(...best), Math.max(...best)];
    const room = 0.15 * (high - low) || 0.05 * Math.abs(high) || 1;
    show("history", [
      { type: "scatter", mode: "lines", x: step, y: best, line: { color: colour("--c0"), width: 2, shape: "hv" }, hovertemplate: "least so far: %{y:.6g}<extra></extra>" },
      { type: "scatter", mode: "markers", x: step, y: value, customdata: seconds, marker: { size: 6, color: colour("--c1") },
        hovertemplate: seconds.length ? "%{y:.6g} after %{customdata:.2f} s<extra></extra>" : "%{y:.6g}<extra></extra>" },
    ], { xaxis: { title: { text: "evaluations of the validation error" }, zeroline: false }, yaxis: { range: [low - room, high + 3 * room], zeroline: false } });
  }
  const drawModel = content.effects ? drawEffects : drawFeatures;
  function draw() { drawErrors(); drawModel(); drawPoints(); drawHistory(); }
  $("choose")?.addEventListener("input", drawModel);
  for (const form of all("form")) form.addEventListener("submit", (event) => event.preventDefault());

  // ------------------------------------------------------------------ the table, and the command
  const rows = all("#all tbody tr");
  $("find").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    const count = rows.filter((row) => !row.hidden).length;
    $("find-count").textContent = `${count} of ${rows.length} shown`;
    $("find-none").hidden = count > 0;
  });
  for (const button of all("[data-copy]")) {
    button.addEventListener("click", async () => {
      try { await navigator.clipboard.writeText(button.dataset.copy); }
      catch {
        const range = document.createRange();
        range.selectNodeContents(button.parentElement.querySelector("code"));
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      $("said").textContent = "Copied the command";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
  paint();
})();
