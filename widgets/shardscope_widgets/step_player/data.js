/* The events of one step, as the player reads them: lookups by time, texts, and a clock that slows down for messages.
 *
 * A row of `events` is [rank, lane, kind, start, end, peer, bytes, item, phase]: times in microseconds, texts as indices.
 */

const BUCKETS = 512;
const MESSAGES_SHARE = 0.65;

const clamp = (x, low = 0, high = 1) => Math.min(high, Math.max(low, x));

function amount(value, units, base) {
  let k = 0;
  while (value >= base * 0.9995 && k < units.length - 1) { value /= base; k += 1; }
  return `${value >= 100 || value === 0 ? Math.round(value) : Number(value.toPrecision(3))} ${units[k]}`;
}
const bytesText = (bytes) => amount(bytes, ["B", "kB", "MB", "GB", "TB"], 1000);
const timeText = (us) => (us === 0 ? "0 ms" : us < 1 ? `${(us * 1000).toFixed(0)} ns` : us >= 1e6 ? `${(us / 1e6).toPrecision(3)} s` : amount(us, ["µs", "ms"], 1000));

/** Return the step's events as objects, with lookups by time. */
function readStep(raw) {
  const texts = raw.texts;
  const events = raw.events.map(([rank, lane, kind, start, end, peer, bytes, item, phase], index) => ({
    index, rank, lane: texts[lane], kind: texts[kind], start, end, peer, bytes, item: texts[item], phase: texts[phase],
  }));
  const step = { ...raw, events, messages: events.filter((e) => e.peer >= 0), duration: Math.max(raw.duration_us, 1e-3) };
  step.spans = events.filter((e) => e.peer < 0);
  step.at = [index(step.messages, step.duration), index(step.spans, step.duration)];
  step.stops = stops(events, step.duration);
  step.clock = warp(step.messages, step.duration);
  step.memoryOf = Array.from({ length: step.world_size }, () => []);
  for (const point of raw.memory) step.memoryOf[point[0]].push(point);
  step.cellsOf = Array.from({ length: step.world_size }, () => ({}));
  for (const [rank, what, index, parts, keys] of raw.cells) (step.cellsOf[rank][what] ??= []).push({ rank, what, index, parts, keys });
  const held = raw.memory.map((point) => point.slice(2).reduce((a, b) => a + b, 0));
  step.mostMemory = Math.max(1, ...held);
  step.fullest = raw.memory[held.indexOf(step.mostMemory)]?.[0] ?? 0;
  step.axes = (raw.axes ?? []).map(([name, size], k, all) => ({ name, size, stride: all.slice(k + 1).reduce((product, [, other]) => product * other, 1) }));
  step.mostBytes = Math.max(1, ...step.messages.map((m) => m.bytes));
  return step;
}

/** Return a function from a time to the events that are running then. */
function index(events, duration) {
  const buckets = Array.from({ length: BUCKETS }, () => []);
  const place = (t) => clamp(Math.floor((t / duration) * BUCKETS), 0, BUCKETS - 1);
  for (const e of events) for (let k = place(e.start); k <= place(e.end); k++) buckets[k].push(e);
  return (t) => buckets[place(t)].filter((e) => e.start <= t && t < e.end);
}

/** Return the times at which something starts; starts that nearly coincide count once. */
function stops(events, duration) {
  const times = [];
  for (const t of events.map((e) => e.start).sort((a, b) => a - b))
    if (!times.length || t - times.at(-1) > duration * 0.002) times.push(t);
  return times;
}

/** Map a playback position (0 to 1) to a time and back: time passes more slowly while messages travel. */
function warp(messages, duration) {
  const merged = [];
  for (const { start, end } of [...messages].sort((a, b) => a.start - b.start))
    if (merged.length && start <= merged.at(-1)[1]) merged.at(-1)[1] = Math.max(merged.at(-1)[1], end);
    else merged.push([start, end]);
  const travelling = merged.reduce((sum, [start, end]) => sum + end - start, 0);
  const share = travelling / duration;
  const slower = share > 0 && share < MESSAGES_SHARE ? (MESSAGES_SHARE / (1 - MESSAGES_SHARE)) * ((1 - share) / share) : 1;
  const knots = [[0, 0]];
  const add = (t, rate) => {
    const [u0, t0] = knots.at(-1);
    if (t > t0) knots.push([u0 + (t - t0) * rate, t]);
  };
  for (const [start, end] of merged) { add(start, 1); add(Math.min(end, duration), slower); }
  add(duration, 1);
  const whole = knots.at(-1)[0] || 1;
  const between = (x, from, to) => {
    let low = 0, high = knots.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; if (knots[mid][from] <= x) low = mid; else high = mid; }
    const a = knots[low], b = knots[high];
    return b[from] === a[from] ? b[to] : a[to] + ((x - a[from]) / (b[from] - a[from])) * (b[to] - a[to]);
  };
  return { time: (u) => between(u * whole, 0, 1), position: (t) => between(t, 1, 0) / whole };
}

/** Return how full a cell is at a time, from 0 to 1: linear between its keys, [time, level, time, level, ...]. */
function levelAt({ keys }, t) {
  let low = 0, high = keys.length / 2;
  while (low < high) { const mid = (low + high) >> 1; if (keys[2 * mid] <= t) low = mid + 1; else high = mid; }
  if (!low) return 0;
  const at = 2 * (low - 1), [t0, a, t1, b] = [keys[at], keys[at + 1], keys[at + 2], keys[at + 3]];
  return t1 === undefined || t1 === t0 ? a : a + ((b - a) * (t - t0)) / (t1 - t0);
}

/** Return whether a rank has passed on what a cell held: it is empty and was not before. */
const isSentOn = (cell, t) => cell.what === "gradients" && levelAt(cell, t) < 0.005 && cell.keys.some((level, k) => k % 2 && level > 0.005 && cell.keys[k - 1] < t);

/** Explain a cell in a sentence. */
function cellSentence(step, cell, t) {
  const level = levelAt(cell, t), n = step.num_summed, count = Math.floor(level * n + 0.01), of = step.axes.length ? "ranks of its data group" : "ranks";
  const whose = capital(nameOf(step, cell.rank)), chunk = (step.cellsOf[cell.rank][cell.what].length > 1 ? `chunk ${cell.index} of the ` : "the ") + cell.what;
  if (cell.what === "micro-batches") return `${whose}, micro-batch ${cell.index}: ${level > 0.999 ? "forward and backward pass done" : level >= 0.5 ? "forward pass done" : level > 0 ? "in its forward pass" : "not started"}.`;
  if (cell.what === "parameters" && n > 1) return `${whose}, ${chunk}: ${level > 0.999 ? "held and up to date" : level > 0 ? `${Math.round(100 * level)} % has arrived` : "not held, or out of date"}.`;
  if (cell.parts > 1) return `${whose}, ${chunk}: ${Math.round(100 * level)} % of the sum over all ${of}, in ${cell.parts} parts.`;
  const state = level > 0.999 ? `complete, the sum over all ${n} ${of}` : isSentOn(cell, t) ? "passed on to the next rank" : count > 1 ? `partly summed, over ${count} of ${n} ${of}` : count ? "this rank's own, not yet summed" : "not computed yet";
  return `${whose}, ${chunk}: ${state}.`;
}

const LETTERS = { forward: "F", backward: "B", optimizer: "O", server_update: "O", data: "D", codec: "C", encode: "C", decode: "C", recompute: "R" };
const axisOf = (name) => (name.includes(":") ? name.split(":")[0] : "");
const plain = (name) => name.replaceAll("_", " ").replace(":", ": ").replace(/all (reduce|gather)|reduce (scatter)|all to all/, (found) => found.replaceAll(" ", "-"));
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const nameOf = (step, rank) => `rank ${rank}${step.roles[rank] ? ` (${step.roles[rank]})` : ""}`;
const chunkOf = (e) => (/(?:chunk|micro-batch) (\d+)/.exec(e.item) || [])[1] ?? "";
const isControl = (e) => e.bytes <= 64;

/** Explain an event in a sentence. */
function sentence(step, e) {
  const took = e.end > e.start ? `, in ${timeText(e.end - e.start)}` : "";
  if (e.peer >= 0) {
    const kind = plain(e.kind), [part, round] = e.phase.split(/, (.*)/s);
    const where = round && kind.endsWith(part) ? `${kind}, ${round}` : [kind, e.phase].filter(Boolean).join(": ");
    return `${capital(nameOf(step, e.rank))} sends ${e.item}, ${bytesText(e.bytes)}, to ${nameOf(step, e.peer)}${took} (${where}).`;
  }
  const item = e.item ? ` of ${e.item}` : "";
  if (e.lane === "communication") {
    const sent = e.bytes ? ` and sends ${bytesText(e.bytes)}` : "";
    return `${capital(nameOf(step, e.rank))} takes part in the ${plain(e.kind)}${item}${sent}${took}.`;
  }
  const what = { forward: "the forward pass", backward: "the backward pass", optimizer: "the optimizer update", data: "reading the batch", server_update: "the server update" };
  return `${capital(nameOf(step, e.rank))} is busy with ${what[e.kind] ?? plain(e.kind)}${item}${took}.`;
}
