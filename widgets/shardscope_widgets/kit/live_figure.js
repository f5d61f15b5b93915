/* Draws the trait `figure` with Plotly: always the newest value, one drawing at a time, as wide as its container. */

/** Load Plotly once per page, from a model that all figures share. */
function plotly(model) {
  window.shardscopePlotly ??= (async () => {
    const library = await model.widget_manager.get_model(model.get("library").replace("IPY_MODEL_", ""));
    const zip = Uint8Array.from(atob(library.get("packed")), (c) => c.charCodeAt(0));
    const code = new Blob([zip]).stream().pipeThrough(new DecompressionStream("gzip"));
    const text = `const module = { exports: {} }, exports = module.exports, define = undefined;
      ${await new Response(code).text()}
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

const NARROW_PX = 560;
const BETWEEN_PX = 80; // for ticks, a title, and the next heading

/** Put plots side by side below each other, in reading order, in a figure narrower than `NARROW_PX`. */
function stacked(layout, width) {
  const ends = (axis) => layout[axis]?.domain ?? [0, 1];
  const plots = Object.keys(layout).filter((name) => name.startsWith("xaxis"))
    .map((x) => ({ x, y: x.replace("x", "y"), across: ends(x), up: ends(x.replace("x", "y")) }))
    .sort((a, b) => b.up[1] - a.up[1] || a.across[0] - b.across[0]);
  if (width > NARROW_PX || !plots.some((plot) => plot.across[0] >= 0.3)) return layout;
  const { t = 0, b = 0 } = layout.margin ?? {};
  const heights = plots.map(({ up }) => (up[1] - up[0]) * (layout.height - t - b));
  const whole = heights.reduce((sum, height) => sum + height + BETWEEN_PX, -BETWEEN_PX);
  let top = whole;
  plots.forEach((plot, place) => {
    plot.rows = [(top - heights[place]) / whole, top / whole];
    top -= heights[place] + BETWEEN_PX;
  });
  const isIn = ([from, to], at) => at >= from - 1e-6 && at <= to + 0.05;
  const move = (note) => {
    const plot = plots.find(({ across, up }) => isIn(across, note.x) && isIn(up, note.y));
    if (note.xref !== "paper" || note.yref !== "paper" || !plot) return note;
    const { across: [left, right], up: [low, high], rows } = plot;
    const y = rows[0] + ((note.y - low) / (high - low)) * (rows[1] - rows[0]);
    return { ...note, x: (note.x - left) / (right - left), y };
  };
  const axes = plots.flatMap(({ x, y, rows }) => [
    [x, { ...layout[x], domain: [0, 1] }], [y, { ...layout[y], domain: rows }],
  ]);
  return {
    ...layout,
    ...Object.fromEntries(axes),
    height: whole + t + b,
    annotations: layout.annotations?.map(move),
  };
}

const VALUES = new Set(["x", "y", "base", "text", "customdata", "hovertext"]);
const MARKS = ["shapes", "annotations"];
const AT_ONCE = { mode: "immediate", transition: { duration: 0 }, frame: { duration: 0, redraw: false } };
const text = (object, isMeant = () => true) => JSON.stringify(Object.entries(object).filter(([name]) => isMeant(name)));

/** Whether only values and marks differ, on fixed axes: moving is twice as fast as drawing. */
function isMoved(was, now) {
  if (Object.values(now.layout).some((axis) => axis?.autorange)) return false;
  const isLook = (name) => !VALUES.has(name);
  const isPlot = (name) => !MARKS.includes(name);
  return was?.data.length === now.data.length && text(was.layout, isPlot) === text(now.layout, isPlot)
    && now.data.every((trace, at) => trace.x?.length === was.data[at].x?.length
      && text(trace, isLook) === text(was.data[at], isLook));
}

/** Move the drawn figure `was` to the values and marks of `now`. */
async function move(Plotly, place, was, now) {
  const pick = (trace) => Object.fromEntries(Object.entries(trace).filter(([name]) => VALUES.has(name)));
  await Plotly.animate(place, { data: now.data.map(pick), traces: now.data.map((_, at) => at) }, AT_ONCE);
  const marks = MARKS.filter((name) => JSON.stringify(was.layout[name]) !== JSON.stringify(now.layout[name]));
  const changes = Object.fromEntries(marks.map((name) => [name, now.layout[name] ?? []]));
  if (marks.length) await Plotly.relayout(place, changes);
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
  let drawn = null;

  const draw = async () => {
    isStale = true;
    if (!Plotly || isDrawing || el.clientWidth === 0) return;
    isDrawing = true;
    try {
      while (isStale) {
        isStale = false;
        const { data, layout } = structuredClone(model.get("figure"));
        for (const [name, axis] of Object.entries(layout)) {
          if (/^[xy]axis/.test(name) && !axis.range) axis.autorange ??= true; // else the last one stays
        }
        const width = el.clientWidth;
        const next = { data, layout: { ...stacked(layout, width), autosize: false, width } };
        const was = structuredClone(next); // Plotly writes into its input
        const config = drawn ? [] : [Plotly.figureConfig(Plotly, model, el)]; // in images.js; takes 5 ms
        const before = drawn;
        drawn = null;
        if (isMoved(before, next)) await move(Plotly, place, before, next);
        else await Plotly.react(place, next.data, next.layout, ...config);
        drawn = was;
      }
    } finally {
      isDrawing = false;
    }
  };

  const size = new ResizeObserver(() => { if (isStale || el.clientWidth !== drawn?.layout.width) draw(); }); // it was hidden
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
