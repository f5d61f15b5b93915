/* Opens the panels of a built page in Pyodide, which starts as the page starts it; importing a module is an error.

   node open_panels.mjs PAGE */

import { readFileSync } from "node:fs";
import { gunzipSync } from "node:zlib";

const page = process.argv[2];

const OPEN = `
import json, sys, page_bridge

sent, before = [], set(sys.modules)
page_bridge.connect(lambda text, buffers: sent.append(json.loads(text)["comm_id"]))
models = [page_bridge.open_panel(name, "{}") for name in names.split()]
assert set(sys.modules) == before, set(sys.modules) - before
assert sent[0] == "page-1", "a panel was open before"
assert set(models) <= set(sent)
f"{len(models)} panels"
`;
const unpacked = (name) => new Uint8Array(gunzipSync(readFileSync(`${page}/python/${name}.gz`)));

try {
  const { grow, put, start } = await import(`${page}/start.js`);
  const { FILES, LIBRARIES } = await import(`${page}/python/parts.js`);
  const memory = unpacked("memory");
  const pyodide = await start(LIBRARIES, { _loadSnapshot: memory }, (module) => grow(module, memory));
  const files = unpacked("files");
  let from = 0;
  for (const [path, size] of FILES) put(pyodide.FS, path, files.subarray(from, from += size));
  pyodide.globals.set("names", "MemoryCalculator CommunicationCalculator PipelineExplorer Planner");
  console.log(pyodide.runPython(OPEN));
} catch (error) {
  console.error(String(error)); // uncaught, it would come with the line of Pyodide's script, which is all of it
  process.exit(1);
}
