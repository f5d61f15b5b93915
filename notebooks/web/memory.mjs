/* Opens the panels in Pyodide and writes its memory and its files for the page; memory.py calls it.

   node memory.mjs PAGE ROOT ASKED, where ROOT holds the files of Python, and ASKED are the libraries and panels */

import crypto from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";

const [page, root, asked] = process.argv.slice(2);
const { libraries, panels } = JSON.parse(asked);

const WARM = `
import random
import sys
from importlib.machinery import SourceFileLoader

sys.dont_write_bytecode = True
sys.path.insert(0, "/lib/page")
usual = SourceFileLoader.source_to_code

def compiled(loader, data, path, **_options):
    is_own = "/shardscope" in path  # the others go without docstrings: the page shows none
    return compile(data, path, "exec", dont_inherit=True, optimize=-1 if is_own else 2)

SourceFileLoader.source_to_code = compiled
import page_bridge

page_bridge.warm(panels.split())
del page_bridge, panels, compiled
SourceFileLoader.source_to_code = usual

files = {getattr(module, "__file__", None) or "" for module in sys.modules.values()}
assert {path for path in files if path.endswith(".so")} == set(libraries.split()), sorted(files)
imported = "\\n".join(path for path in files if path.startswith("/lib/p") and "/shardscope" not in path)
del libraries, files, usual
random.seed(0)
for size in (480, *range(1, 513, 8)):  # what was freed holds old bytes, and would be downloaded
    kept = [bytes(size) for _ in range((40_000_000 if size == 480 else 4_000_000) // (size + 33))]
    del kept
del size
`;

/** Let random numbers and clocks give the same values each time, so that the memory has the same bytes. */
function standStill() {
  let ticks = 0;
  crypto.randomFillSync = (view) => view.fill(1);
  performance.now = () => ++ticks / 1000;
  Date.now = () => Math.floor(1e12 + ++ticks / 1000);
}

/** Set all freed memory to zero: take every free block below the top, the large ones first. */
function zeroFreed(module) {
  const [top, taken] = [module._sbrk(0), []];
  for (let size = 2 ** 20; size >= 16; size /= 2) {
    for (;;) {
      const block = module._malloc(size);
      taken.push(block);
      if (block >= top) break;
      module.HEAPU8.fill(0, block, block + size);
    }
  }
  taken.forEach((block) => module._free(block));
}

function* filesIn(folder) {
  for (const entry of readdirSync(folder, { withFileTypes: true }).sort((a, b) => (a.name < b.name ? -1 : 1))) {
    const path = join(folder, entry.name);
    if (entry.isDirectory()) yield* filesIn(path);
    else yield path;
  }
}

const write = (name, bytes) => writeFileSync(join(page, "python", name), gzipSync(bytes, { level: 9 }));

try {
  standStill();
  const { start, put } = await import(join(page, "start.js"));
  const env = { PYTHONHASHSEED: "0", PYTHONNODEBUGRANGES: "1" }; // the same bytes each time, and no columns of code
  const pyodide = await start(libraries, { _makeSnapshot: true, env });
  const files = [...filesIn(root)].map((path) => [path.slice(root.length), readFileSync(path)]);
  for (const [path, bytes] of files) put(pyodide.FS, path, new Uint8Array(bytes));
  for (const [name, value] of Object.entries({ panels, libraries })) pyodide.globals.set(name, value.join(" "));
  pyodide.runPython(WARM);
  const imported = new Set(pyodide.globals.get("imported").split("\n"));
  pyodide.globals.delete("imported");
  zeroFreed(pyodide._module);
  const memory = pyodide.makeMemorySnapshot();
  const later = files.filter(([path]) => !imported.has(path));
  const parts = {
    LIBRARIES: libraries,
    MEMORY: memory.length,
    FILES: later.map(([path, bytes]) => [path, bytes.length]),
  };
  write("memory.gz", memory);
  write("files.gz", Buffer.concat(later.map(([, bytes]) => bytes)));
  const lines = Object.entries(parts).map(([name, value]) => `export const ${name} = ${JSON.stringify(value)};\n`);
  writeFileSync(join(page, "python/parts.js"), lines.join(""));
} catch (error) {
  console.error(String(error)); // uncaught, it would come with the line of Pyodide's script, which is all of it
  process.exit(1);
}
