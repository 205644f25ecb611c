// Light and dark: the system's choice until the reader makes another. Returns `paint`, which colours the page and calls
// `repaint` for what style sheets do not reach.
function followTheme(repaint) {
  "use strict";
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("bilevel-theme"); } catch { /* a file may have no storage */ }
  const dark = () => root.dataset.theme === "dark";
  function paint() {
    root.dataset.theme = chosen || (prefers.matches ? "dark" : "light");
    button.setAttribute("aria-pressed", String(dark()));
    document.getElementById("theme-word").textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`);
    repaint();
  }
  button.addEventListener("click", () => {
    // Back at the system's choice, the page follows it again.
    const next = dark() ? "light" : "dark";
    chosen = next === (prefers.matches ? "dark" : "light") ? null : next;
    try {
      if (chosen) localStorage.setItem("bilevel-theme", chosen);
      else localStorage.removeItem("bilevel-theme");
    } catch { /* then it lasts as long as the page */ }
    paint();
  });
  prefers.addEventListener("change", paint);
  return paint;
}
