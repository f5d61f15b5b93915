/* Draws the trait `figure` with Plotly: always the newest value, one drawing at a time, as wide as its container. */

const CONFIG = { displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

/** Load Plotly once per page; its source text is in a model that all figures share. */
function plotly(model) {
  window.shardscopePlotly ??= (async () => {
    const library = await model.widget_manager.get_model(model.get("library").replace("IPY_MODEL_", ""));
    const text = `const module = { exports: {} }, exports = module.exports, define = undefined;
      ${library.get("code")}
      ;export default module.exports;`;
    const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
    try {
      return (await import(url)).default;
    } finally {
      URL.revokeObjectURL(url);
    }
  })();
  return window.shardscopePlotly;
}

function render({ model, el }) {
  const place = document.createElement("div");
  if (model.get("label")) {
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", model.get("label"));
  }
  el.style.width = "100%";
  el.append(place);
  let Plotly = null;
  let isDrawing = false;
  let isStale = true;

  const draw = async () => {
    isStale = true;
    if (!Plotly || isDrawing || el.clientWidth === 0) return;
    isDrawing = true;
    try {
      while (isStale) {
        isStale = false;
        const { data, layout } = structuredClone(model.get("figure"));
        await Plotly.react(place, data, { ...layout, autosize: false, width: el.clientWidth }, CONFIG);
      }
    } finally {
      isDrawing = false;
    }
  };

  const size = new ResizeObserver(draw);
  size.observe(el);
  model.on("change:figure", draw);
  plotly(model).then((loaded) => { Plotly = loaded; return draw(); });
  return () => {
    size.disconnect();
    model.off("change:figure", draw);
    Plotly?.purge(place);
  };
}

export default { render };
