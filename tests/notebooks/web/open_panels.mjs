/* Opens the panels of a built page in Pyodide, where compiling a module is an error.

   node open_panels.mjs PAGE */

import { readFileSync } from "node:fs";

const page = process.argv[2];

const OPEN = `
import sys
from importlib.machinery import SourceFileLoader

def refuse(loader, data, path, **_options):
    raise AssertionError(f"{path} has no bytecode")

SourceFileLoader.source_to_code = refuse
sys.path.insert(0, "/lib/page")
import page_bridge

page_bridge.connect(lambda text, buffers: None)
opened = [page_bridge.open_panel(name, "{}") for name in names]
f"{len(opened)} panels"
`;

const { loadPyodide } = await import(`${page}/pyodide/pyodide.mjs`);
const pyodide = await loadPyodide({ packages: ["numpy", "pydantic"] });
pyodide.unpackArchive(new Uint8Array(readFileSync(`${page}/bundle.zip`)), "zip", { extractDir: "/" });
pyodide.globals.set("names", ["MemoryCalculator", "CommunicationCalculator", "PipelineExplorer", "Planner"]);
console.log(pyodide.runPython(OPEN));
