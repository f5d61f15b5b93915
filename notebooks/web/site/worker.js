/* The kernel of the page: Pyodide in a worker, with the packages and the bridge to the widgets.

   Messages in:  {open: name, settings}, {comm: id, text, buffers, id}
   Messages out: {step}, {ready}, {opened, model}, {comm, buffers, cause}, {done: id}, {failed}; `cause` is the id of
   the message that is being handled */

import { loadPyodide } from "./pyodide/pyodide.mjs";

const PACKAGES = ["numpy", "pydantic"];

let handling = null; // id of the message from the page that the widgets handle now

const say = (step) => self.postMessage({ step });

/** Tell the page what failed, which is the last line of a Python error; the console has all of it. */
function fail(error) {
  console.error(error);
  self.postMessage({ failed: String(error).trim().split("\n").at(-1) });
}

async function start() {
  say("Loading Python; the panel answers what you change once it has loaded");
  const archive = fetch("./bundle.zip").then((answer) => answer.arrayBuffer());
  const pyodide = await loadPyodide({ packages: PACKAGES });
  say("Loading the calculators");
  pyodide.unpackArchive(await archive, "zip", { extractDir: "/" });
  pyodide.runPython("import sys; sys.path.insert(0, '/lib/page')");
  const bridge = pyodide.pyimport("page_bridge");
  bridge.connect((text, buffers) => {
    const copies = buffers.toJs().map((buffer) => new DataView(buffer.slice().buffer));
    self.postMessage({ comm: text, buffers: copies, cause: handling });
  });
  self.postMessage({ ready: true });
  return bridge;
}

const started = start();
started.catch(fail);

const answers = {
  open: (bridge, { open, settings }) => {
    self.postMessage({ opened: open, model: bridge.open_panel(open, JSON.stringify(settings)) });
  },
  comm: (bridge, { comm, text, buffers, id }) => {
    handling = id;
    try {
      bridge.deliver(comm, text, buffers);
    } finally {
      handling = null;
      self.postMessage({ done: id });
    }
  },
};

self.onmessage = async ({ data }) => {
  const bridge = await started;
  try {
    answers["open" in data ? "open" : "comm"](bridge, data);
  } catch (error) {
    fail(error);
  }
};
