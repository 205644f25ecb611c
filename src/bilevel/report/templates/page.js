(() => {
  "use strict";
  const $ = (id) => document.getElementById(id);
  const all = (query, inside = document) => [...inside.querySelectorAll(query)];
  const root = document.documentElement;
  const say = (text) => { $("said").textContent = text; };
  root.classList.add("js");

  const paint = followTheme(() => recolour());

  // ------------------------------------------------------------------ tabs and addresses
  const tabs = all("[role=tab]");
  const panels = tabs.map((tab) => $(tab.getAttribute("aria-controls")));
  const landing = tabs.findIndex((tab) => tab.getAttribute("aria-selected") === "true");
  function select(index) {
    $("overview").hidden = index !== landing;
    tabs.forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === index));
      tab.tabIndex = i === index ? 0 : -1;
      panels[i].hidden = i !== index;
    });
    tabs[index].scrollIntoView({ block: "nearest", inline: "nearest" });
    if (panels[index].id === "training") draw();
  }
  function go(move) {
    let name = location.hash.slice(1);
    try { name = decodeURIComponent(name); } catch { /* a broken address is none */ }
    const target = (name && $(name)) || panels[landing];
    const index = panels.findIndex((panel) => panel.contains(target));
    if (index < 0) return;
    select(index);
    if (!move) return;
    if (panels.includes(target)) scrollTo(0, 0);
    else { target.focus({ preventScroll: true }); target.scrollIntoView(); }
  }
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", (event) => {
      event.preventDefault();
      history.pushState(null, "", tab.getAttribute("href"));
      go(true);
    });
    tab.addEventListener("keydown", (event) => {
      const next = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (event.key === " ") { event.preventDefault(); tab.click(); }
      if (next === undefined) return;
      event.preventDefault();
      const to = tabs[(next + tabs.length) % tabs.length];
      to.click();
      to.focus();
    });
  });
  addEventListener("hashchange", () => go(true));
  addEventListener("popstate", () => go(true));

  // ------------------------------------------------------------------ results
  const results = all(".result");
  $("find")?.addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const result of results) {
      const text = result.textContent.toLowerCase();
      result.hidden = !words.every((word) => text.includes(word));
      const link = document.querySelector(`.toc a[href="#${CSS.escape(result.id)}"]`);
      if (link) link.parentElement.hidden = result.hidden;
      count += !result.hidden;
    }
    $("find-count").textContent = `${count} of ${results.length} shown`;
    $("find-none").hidden = count > 0;
  });
  for (const button of all("[data-copy]")) {
    button.addEventListener("click", async () => {
      try { await navigator.clipboard.writeText(button.dataset.copy); }
      catch { copyOldWay(button); }
      button.textContent = "Copied";
      say("Copied the command");
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
  function copyOldWay(button) {
    const range = document.createRange();
    range.selectNodeContents(button.parentElement.querySelector("code"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    document.execCommand("copy");
  }

  // ------------------------------------------------------------------ the large view of pictures and queries
  const large = $("large");
  function open(title, content, small) {
    $("large-title").textContent = title;
    $("large-content").replaceChildren(...content);
    large.classList.toggle("small", small);
    large.showModal();
  }
  function make(tag, text, name) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    return element;
  }
  function copyOf(button) {
    const picture = button.querySelector("img").cloneNode();
    picture.removeAttribute("loading");
    return picture;
  }
  large.addEventListener("click", (event) => {
    if (event.target === large || event.target.closest("[data-close]")) large.close();
  });
  for (const button of all("[data-large]")) {
    button.addEventListener("click", () => open(button.dataset.large, [copyOf(button)], false));
  }
  for (const query of all(".query")) {
    query.addEventListener("click", () => {
      const names = all(".class", query.closest(".episode")).map((row) => row.dataset.class);
      const [answer, predicted] = [Number(query.dataset.answer), Number(query.dataset.predicted)];
      const table = make("table");
      table.append(make("caption", "Probability of every class"));
      query.dataset.p.split(" ").map(Number).forEach((p, i) => {
        const row = table.insertRow();
        row.className = i === answer ? "answer" : "";
        const head = make("th", `${i + 1} · ${names[i]}${i === answer ? " (its class)" : ""}${i === predicted ? " (the answer)" : ""}`);
        head.scope = "row";
        row.append(head);
        const meter = make("span", undefined, "meter");
        meter.append(make("span"));
        meter.firstChild.style.width = `${100 * p}%`;
        row.insertCell().append(meter);
        row.insertCell().textContent = `${(100 * p).toFixed(1)} %`;
      });
      const picture = copyOf(query);
      picture.alt = `A query of class ${answer + 1}, ${names[answer]}`;
      const word = answer === predicted ? "✓ Right" : `✗ Taken for ${names[predicted]}`;
      open(`${names[answer]}: ${word}`, [picture, table], true);
    });
  }

  // ------------------------------------------------------------------ episodes
  const form = $("episodes-form");
  function narrow() {
    const [model, answer, name] = ["by-model", "by-answer", "by-class"].map((id) => $(id).value);
    const [low, high] = [Number($("at-least").value), Number($("at-most").value)];
    $("at-least-out").textContent = `${low} %`;
    $("at-most-out").textContent = `${high} %`;
    let [shown, total] = [0, 0];
    for (const section of all(".model")) {
      let inModel = 0;
      for (const episode of all(".episode", section)) {
        let inEpisode = 0;
        for (const row of all(".class", episode)) {
          let inRow = 0;
          for (const query of all(".query", row)) {
            const p = 100 * Number(query.dataset.p.split(" ")[query.dataset.predicted]);
            const kept = (!answer || query.classList.contains(answer)) && (low === 0 || p >= low) && (high === 100 || p <= high);
            query.parentElement.hidden = !kept;
            inRow += kept;
            total += 1;
          }
          if (name && row.dataset.class !== name) inRow = 0;
          row.hidden = inRow === 0;
          inEpisode += inRow;
        }
        episode.hidden = inEpisode === 0;
        inModel += inEpisode;
      }
      const narrowed = model || answer || name || low > 0 || high < 100;
      section.hidden = Boolean(model && section.id !== model) || Boolean(narrowed && inModel === 0);
      shown += section.hidden ? 0 : inModel;
    }
    $("episodes-count").textContent = `${shown} of ${total} queries shown`;
    $("episodes-none").hidden = shown > 0;
  }
  if (form) {
    const names = [...new Set(all(".class").map((row) => row.dataset.class))].sort();
    for (const name of names) $("by-class").append(new Option(name, name));
    form.addEventListener("input", narrow);
    form.addEventListener("reset", () => setTimeout(narrow));
    form.addEventListener("submit", (event) => event.preventDefault());
    narrow();
  }

  // ------------------------------------------------------------------ curves
  const figures = $("charts") ? JSON.parse($("charts").textContent) : {};
  const DASHES = { solid: "", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "11 4" };
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const runColour = (run) => colour(`--c${run % 8}`);
  const curvesForm = $("curves-form");
  const charts = () => all(".chart").filter((chart) => chart.data);
  let drawn = false;
  const axis = () => curvesForm.elements.axis.value;
  const picked = (run) => curvesForm.querySelector(`[name=run][value="${run}"]`).checked;
  function frame(kind) {
    const grid = { gridcolor: colour("--grid"), zerolinecolor: colour("--grid"), linecolor: colour("--line") };
    return {
      margin: { l: 50, r: 14, t: 10, b: 46 }, showlegend: false, hovermode: "x unified", dragmode: "zoom",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--text"), family: "system-ui, sans-serif", size: 13 },
      hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--text") }, namelength: -1 },
      modebar: { color: colour("--muted"), activecolor: colour("--accent"), bgcolor: "rgba(0,0,0,0)" },
      xaxis: { ...grid, autorange: true, title: { text: axis() === "minutes" ? "minutes" : "hyperiterations" } },
      yaxis: { ...grid, autorange: true, type: kind === "loss" && $("log-loss").checked ? "log" : "linear",
               rangemode: kind === "speed" ? "tozero" : "normal" },
    };
  }
  function styled(trace) {
    const tint = runColour(trace.meta.run);
    const line = { ...trace.line, color: tint };
    const look = { ...trace, x: trace.meta[axis()], visible: picked(trace.meta.run), line };
    if (trace.meta.part === "band") return { ...look, visible: look.visible && $("bands").checked, fillcolor: tint + "30" };
    return { ...look, marker: { ...trace.marker, color: tint } };
  }
  function render(chart, keep) {
    const kind = chart.id.replace("chart-", "");
    const layout = frame(kind);
    for (const name of ["xaxis", "yaxis"]) {
      // Automatic axes too: where nothing else has changed, plotly would forget their ranges.
      const before = keep && chart._fullLayout?.[name];
      if (before && before.type === (layout[name].type ?? "linear")) {
        Object.assign(layout[name], { range: [...before.range], autorange: before.autorange });
      }
    }
    const options = { displaylogo: false, responsive: true, displayModeBar: "hover",
                      modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };
    return Plotly.react(chart, figures[kind].map(styled), layout, options);
  }
  function redraw(keep) { if (drawn) charts().forEach((chart) => render(chart, keep)); }
  function draw() {
    // A hidden chart does not notice that the window has another width.
    if (drawn) charts().forEach((chart) => Plotly.Plots.resize(chart));
    if (drawn || !curvesForm) return;
    drawn = true;
    for (const chart of all(".chart")) {
      if (!figures[chart.id.replace("chart-", "")].length) {
        chart.append(make("p", "No run recorded this.", "muted"));
        chart.style.height = "auto";
        continue;
      }
      render(chart, false).then(() => chart.on("plotly_relayout", (change) => follow(chart, change)));
    }
  }
  function recolour() {
    for (const swatch of all(".swatch")) {
      const run = Number(swatch.dataset.run);
      const trace = Object.values(figures).flat().find((one) => one.meta.run === run && one.meta.part === "line");
      swatch.firstElementChild.setAttribute("stroke", runColour(run));
      swatch.firstElementChild.setAttribute("stroke-dasharray", DASHES[trace?.line.dash] ?? "");
    }
    redraw(true);
  }
  let following = false;
  function follow(from, change) {
    const range = change["xaxis.range[0]"] !== undefined ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : null;
    if (following || (!range && !change["xaxis.autorange"])) return;
    zoomTo(range, from);
  }
  async function zoomTo(range, except) {
    following = true;
    const layout = range ? { "xaxis.range": range, "xaxis.autorange": false } : { "xaxis.autorange": true, "yaxis.autorange": true };
    await Promise.all(charts().filter((chart) => chart !== except).map((chart) => Plotly.relayout(chart, layout)));
    following = false;
  }
  function zoomBy(factor) {
    if (!charts().length) return;
    const [low, high] = charts()[0]._fullLayout.xaxis.range; // the layout of an automatic axis has none
    const [middle, half] = [(low + high) / 2, ((high - low) / 2) * factor];
    zoomTo([middle - half, middle + half]);
  }
  if (curvesForm) {
    curvesForm.addEventListener("submit", (event) => event.preventDefault());
    curvesForm.addEventListener("change", (event) => {
      redraw(event.target.name !== "axis");
      if (event.target.name === "run") say(`${all("[name=run]:checked").length} of ${all("[name=run]").length} runs drawn`);
      for (const row of all("#training tr[data-run]")) row.hidden = !picked(row.dataset.run);
    });
    const tickAll = (on) => {
      for (const box of all("[name=run]")) box.checked = on;
      curvesForm.querySelector("[name=run]").dispatchEvent(new Event("change", { bubbles: true }));
    };
    $("all-runs")?.addEventListener("click", () => tickAll(true));
    $("no-runs")?.addEventListener("click", () => tickAll(false));
    $("zoom-in").addEventListener("click", () => zoomBy(0.5));
    $("zoom-out").addEventListener("click", () => zoomBy(2));
    $("zoom-reset").addEventListener("click", () => zoomTo(null));
  }
  addEventListener("beforeprint", draw);

  paint();
  go(Boolean(location.hash));
})();
