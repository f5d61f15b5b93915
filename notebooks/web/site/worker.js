/* The kernel of the page: Pyodide in a worker, as it was when the page was built, and the bridge to the widgets.

   Messages in:  {open: name, settings}, {comm: id, text, buffers, id}
   Messages out: {step}, {ready}, {opened, model}, {comm, buffers, cause}, {done: id}, {failed}; `cause` is the id of
   the message that is being handled */

import { FILES, LIBRARIES, MEMORY } from "./python/parts.js";
import { grow, put, start as startPyodide } from "./start.js";

let handling = null; // id of the message from the page that the widgets handle now

const say = (step) => self.postMessage({ step });

/** Tell the page what failed, which is the last line of a Python error; the console has all of it. */
function fail(error) {
  console.error(error);
  self.postMessage({ failed: String(error).trim().split("\n").at(-1) });
}

/** Memory of `size` bytes, and a promise that it holds the bytes that are packed at an address. */
function unpack(address, size) {
  const bytes = new Uint8Array(size);
  const load = async () => {
    const answer = await fetch(address);
    if (!answer.ok) throw new Error(`cannot load ${address}: ${answer.status}`);
    let filled = 0;
    for (const parts = answer.body.pipeThrough(new DecompressionStream("gzip")).getReader(); ;) {
      const { done, value } = await parts.read();
      if (done) break;
      bytes.set(value, filled);
      filled += value.length;
    }
    if (filled !== size) throw new Error(`${address} holds ${filled} bytes instead of ${size}`);
  };
  return { bytes, filled: load() };
}

async function start() {
  say("Loading Python; the panel answers what you change once it has loaded");
  const memory = unpack("./python/memory.gz", MEMORY);
  const files = unpack("./python/files.gz", FILES.reduce((sum, [, size]) => sum + size, 0));
  const pyodide = await startPyodide(LIBRARIES, { _loadSnapshot: memory.bytes }, async (module) => {
    await memory.filled;
    grow(module, memory.bytes);
  });
  await files.filled;
  let from = 0;
  for (const [path, size] of FILES) put(pyodide.FS, path, files.bytes.subarray(from, from += size));
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
