/* The events of one step, as the player reads them: lookups by time, texts, and a clock that slows down for messages.
 *
 * A row of `events` is [rank, lane, kind, start, end, peer, bytes, item, phase]: times in microseconds, texts as indices.
 */

const BUCKETS = 512;
const MESSAGES_SHARE = 0.55;

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
  step.mostMemory = Math.max(1, ...raw.memory.map((p) => p.slice(2).reduce((a, b) => a + b, 0)));
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

/** Return the bytes that a rank holds at a time, by type of memory. */
function memoryAt(step, rank, t) {
  const points = step.memoryOf[rank];
  let low = 0, high = points.length;
  while (low < high) { const mid = (low + high) >> 1; if (points[mid][1] <= t) low = mid + 1; else high = mid; }
  return points.length ? points[Math.max(0, low - 1)].slice(2) : [];
}

const LETTERS = { forward: "F", backward: "B", optimizer: "O", server_update: "O", data: "D", codec: "C", encode: "C", decode: "C", recompute: "R" };
const plain = (name) => name.replaceAll("_", " ");
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const nameOf = (step, rank) => `rank ${rank}${step.roles[rank] ? ` (${step.roles[rank]})` : ""}`;
const chunkOf = (e) => (/(?:chunk|micro-batch) (\d+)/.exec(e.item) || [])[1] ?? "";
const isControl = (e) => e.bytes <= 64;

/** Explain an event in a sentence. */
function sentence(step, e) {
  const took = e.end > e.start ? `, in ${timeText(e.end - e.start)}` : "";
  if (e.peer >= 0) {
    const where = [plain(e.kind), e.phase].filter(Boolean).join(": ");
    return `${capital(nameOf(step, e.rank))} sends ${e.item}, ${bytesText(e.bytes)}, to ${nameOf(step, e.peer)}${took} (${where}).`;
  }
  const item = e.item ? ` of ${e.item}` : "";
  if (e.lane === "communication") {
    const sent = e.bytes ? `, sending ${bytesText(e.bytes)} itself` : "";
    return `${capital(nameOf(step, e.rank))} takes part in ${plain(e.kind)}${item}${sent}${took}.`;
  }
  const what = { forward: "the forward pass", backward: "the backward pass", optimizer: "the optimizer's update", data: "reading the batch", server_update: "the server's update" };
  return `${capital(nameOf(step, e.rank))} is busy with ${what[e.kind] ?? plain(e.kind)}${item}${took}.`;
}
