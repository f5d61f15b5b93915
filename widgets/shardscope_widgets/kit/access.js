/* What ipywidgets lacks, for a whole panel: names and values for screen readers, and readable colours on pages that do
 * not define JupyterLab's. It stands before the script of the panel's heading, which calls `attend`. */

const THEME = ["class", "style", "theme", "data-theme", "data-jp-theme-name"]; // attributes by which pages tell theirs
const NAMELESS = ".noUi-handle:not([data-named]), .js-plotly-plot .main-svg:not([aria-hidden])";

/** Relative luminance of a CSS colour (WCAG 2.2); null if it is transparent. */
function luminance(colour) {
  const parts = colour.match(/[\d.]+/g)?.map(Number) ?? [];
  if (parts.length < 3 || parts[3] === 0) return null;
  const [r, g, b] = parts.slice(0, 3).map((value) => {
    const part = colour.startsWith("color(") ? value : value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** Luminance of the page behind an element. */
function ground(el) {
  for (let at = el; at; at = at.parentElement) {
    const found = luminance(getComputedStyle(at).backgroundColor);
    if (found !== null) return found;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches ? 0.01 : 1;
}

/** Bring our own colours where the page has none, or has dark text on a dark ground. */
function colour(panel) {
  panel.classList.remove("ss-bare", "ss-dark");
  const below = ground(panel.parentElement ?? panel);
  const style = getComputedStyle(panel);
  const text = style.getPropertyValue("--jp-ui-font-color1") && luminance(style.color);
  const contrast = text === "" ? 0 : (Math.max(text, below) + 0.05) / (Math.min(text, below) + 0.05);
  panel.classList.toggle("ss-bare", contrast < 3);
  panel.classList.toggle("ss-dark", contrast < 3 && below < 0.18);
}

const set = (el, name, text) => { if (text && el.getAttribute(name) !== text) el.setAttribute(name, text); };

/** Name a slider's handle as its label does, and tell its value as the number beside it does. */
function nameSlider(handle) {
  const box = handle.closest(".widget-slider");
  const label = box?.querySelector(".widget-label")?.textContent.trim() ? box.querySelector(".widget-label")
    : handle.closest(".ss-sliding")?.querySelector(".ss-about");
  const shown = box?.querySelector(".widget-readout") ?? handle.closest(".ss-sliding")?.querySelector(".ss-value");
  const tell = () => {
    const value = handle.closest(".ss-sliding")?.querySelector(".ss-value") ?? shown;
    set(handle, "aria-label", label?.textContent.trim() || box?.title || "Value");
    set(handle, "aria-valuetext", value?.textContent.trim());
  };
  handle.dataset.named = "";
  tell();
  const watch = new MutationObserver(tell);
  watch.observe(handle, { attributes: true, attributeFilter: ["aria-valuetext"] });
  for (const el of [label, shown]) if (el) watch.observe(el, { childList: true, characterData: true, subtree: true });
}

const FOLDS = ".jupyter-widget-Collapse-header";

/** Say which folded topics are open, and let the keyboard reach and open them, which ipywidgets does not. */
function nameFolds(panel) {
  for (const fold of panel.querySelectorAll(FOLDS)) {
    set(fold, "role", "button");
    set(fold, "tabindex", "0");
    set(fold, "aria-expanded", String(fold.parentElement.classList.contains("jupyter-widget-Collapse-open")));
  }
}

/** Open or close the topic that has the focus, with the keys of a button. */
function pressFold(event) {
  if (!event.target.matches?.(FOLDS) || !["Enter", " "].includes(event.key)) return;
  event.preventDefault();
  event.stopPropagation();
  event.target.click();
}

function nameAll(panel) {
  nameFolds(panel);
  for (const el of panel.querySelectorAll(NAMELESS)) {
    if (el.classList.contains("noUi-handle")) nameSlider(el);
    else el.setAttribute("aria-hidden", "true"); // the sentence below each figure says what it shows
  }
}

/** Attend to a panel; return what ends that. */
function attendTo(panel) {
  let due = 0;
  const watch = new MutationObserver(() => { due ||= setTimeout(() => { due = 0; nameAll(panel); }, 150); });
  const themes = new MutationObserver(() => { colour(panel); setTimeout(() => colour(panel), 600); });
  watch.observe(panel, { childList: true, subtree: true });
  for (const el of [document.documentElement, document.body]) {
    themes.observe(el, { attributes: true, attributeFilter: THEME });
  }
  nameAll(panel);
  colour(panel);
  setTimeout(() => colour(panel), 600);
  const endBoxes = watchBoxes(panel); // in refused.js
  const listeners = { keydown: pressFold, click: () => setTimeout(() => nameFolds(panel)) };
  for (const [name, listen] of Object.entries(listeners)) panel.addEventListener(name, listen);
  const endKeys = keepKeys(panel); // in keys.js
  return () => {
    endKeys();
    watch.disconnect();
    themes.disconnect();
    clearTimeout(due);
    endBoxes();
    for (const [name, listen] of Object.entries(listeners)) panel.removeEventListener(name, listen);
  };
}

/** Attend to the panel around an element once there is one; return a function that ends it. */
function attend(el) {
  let end = () => {};
  const wait = setInterval(() => {
    const panel = el.closest(".ss-lab");
    if (!panel) return;
    clearInterval(wait);
    end = attendTo(panel);
  }, 30);
  return () => { clearInterval(wait); end(); };
}
