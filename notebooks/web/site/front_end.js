/* Jupyter's own widget front end, from the files that ipywidgets and anywidget install for the classic notebook.

   Both are AMD modules, written for a page with require.js and the notebook's own modules. Of these they use little:
   this file supplies that much, and loads the two modules. */

const notebook = { kernel: null, container: { on() {} } };
const modules = {
  "base/js/namespace": { notebook },
  "base/js/events": { on() {} },
  "notebook/js/outputarea": { OutputArea: class { register_mime_type() {} } },
};

function load(address) {
  return new Promise((resolve, reject) => {
    window.define = (names, make) => resolve(make(...names.map((name) => modules[name] ?? {})));
    const script = document.createElement("script");
    script.src = address;
    script.onerror = () => reject(new Error(`cannot load ${address}`));
    document.head.append(script);
  });
}

/** anywidget gives up a model whose module has not loaded within 2 s, which happens while Plotly and Python start. */
const timeout = AbortSignal.timeout.bind(AbortSignal);
AbortSignal.timeout = (ms) => timeout(30 * ms);

/** Load the front end, with its style sheets; return a function that finds a class by module and name. */
export async function loadFrontEnd() {
  window.Jupyter = { version: "6.5.0" };
  window.requirejs = (names, done) => {
    if (names.length > 1) done(...names.map((name) => modules[name])); // a single name asks for the notebook's toolbar
  };
  window.requirejs.config = () => {};
  const widgets = await load("./vendor/widgets.js");
  await widgets.load_ipython_extension();
  for (const name of ["base", "controls", "output"]) modules[`@jupyter-widgets/${name}`] = widgets;
  modules.anywidget = await load("./vendor/anywidget.js");
  delete window.define;
  return (module, name) => {
    const found = modules[module]?.[name];
    if (!found) throw new Error(`the page has no widget ${name} of ${module}`);
    return found;
  };
}

/** Load Plotly while Python starts, so that the first figure finds it: `live_figure.js` asks for it under this name. */
export function loadPlotly() {
  window.shardscopePlotly = Promise.all([import("./vendor/images.js"), import("./vendor/plotly.min.js")])
    .then(([images]) => Object.assign(window.Plotly, images));
}
