/* Draws one ring all-reduce, chunk by chunk, from the measured transfers in the trait `ring`.
 *
 * `position` counts rounds: 2.4 is 40 % through the third. Within a round, every packet leaves and arrives at its
 * measured fraction of the round's duration. All data and texts come from Python; this file only moves shapes. */

const SVG = "http://www.w3.org/2000/svg";
const SIZE = { width: 560, height: 440, cx: 280, cy: 222, radius: 158 };
const SECONDS_A_ROUND = 2.2;

const letter = (chunk) => String.fromCharCode(65 + (chunk % 26));
const clamp = (x) => Math.min(1, Math.max(0, x));
const ease = (x) => (x < 0.5 ? 2 * x * x : 1 - (2 - 2 * x) ** 2 / 2);

function make(tag, attributes = {}, parent = null, text = "") {
  const node = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== "") node.textContent = text;
  parent?.append(node);
  return node;
}

const angle = (rank, world) => -Math.PI / 2 + (2 * Math.PI * rank) / world;
const point = (a, r = SIZE.radius) => [SIZE.cx + r * Math.cos(a), SIZE.cy + r * Math.sin(a)];

/** Draw the cards of all ranks, each with rows of chunk cells; return a function that fills the cells. */
function drawRanks(svg, ring) {
  const world = ring.world_size;
  const side = Math.max(9, Math.min(24, 104 / world));
  const rows = ring.directions.length;
  const width = world * (side + 3) + 17;
  const height = 45 + rows * (side + 3);
  const cells = [];
  for (let rank = 0; rank < world; rank++) {
    const [x, y] = point(angle(rank, world));
    const card = make("svg:g", { transform: `translate(${x - width / 2} ${y - height / 2})` }, svg);
    make("svg:rect", { class: "card", width, height, rx: 9 }, card);
    make("svg:text", { class: "rank", x: width / 2, y: 17 }, card, `rank ${rank}`);
    for (let chunk = 0; chunk < world; chunk++)
      make("svg:text", { class: "letter", x: 10 + chunk * (side + 3) + side / 2, y: 33 }, card, letter(chunk));
    cells.push(ring.directions.map((_, row) =>
      Array.from({ length: world }, (_, chunk) => drawCell(card, chunk, row, side, world))));
  }
  return (counts) => counts.forEach((ranks, row) => ranks.forEach((chunks, rank) =>
    chunks.forEach((count, chunk) => cells[rank][row][chunk](count))));
}

function drawCell(card, chunk, row, side, world) {
  const place = { x: 10 + chunk * (side + 3), y: 38 + row * (side + 3) };
  make("svg:rect", { class: "cell", ...place, width: side, height: side, rx: 3 }, card);
  const level = make("svg:rect", { class: "level", x: place.x, width: side, rx: 3 }, card);
  const label = make("svg:text", { class: "count", x: place.x + side / 2, y: place.y + side / 2 + 4 }, card);
  if (side < 15) label.style.display = "none";
  let shown = -1;
  return (count) => {
    if (count === shown) return;
    shown = count;
    const height = (side * count) / world;
    level.setAttribute("y", place.y + side - height);
    level.setAttribute("height", height);
    level.classList.toggle("whole", count === world);
    label.classList.toggle("on-fill", count * 2 > world);
    label.textContent = count;
  };
}

/** Draw one packet per transfer of a round; return a function that moves all packets to the fraction `part` of the round. */
function drawPackets(layer, ring, transfers) {
  layer.replaceChildren();
  const world = ring.world_size;
  const start = Math.min(...transfers.map((t) => t.start_ms));
  const length = Math.max(...transfers.map((t) => t.end_ms)) - start || 1;
  const packets = transfers.map((t) => {
    const node = make("svg:g", { class: `packet ${t.phase}` }, layer);
    make("svg:rect", { x: -14, y: -11, width: 28, height: 22, rx: 6 }, node);
    make("svg:text", { y: 4 }, node, letter(t.chunk));
    const turn = (2 * Math.PI * t.direction) / world;
    const lane = ring.directions.length > 1 ? 13 * t.direction : 0;
    return { node, from: (t.start_ms - start) / length, to: (t.end_ms - start) / length, a: angle(t.source, world), turn, lane };
  });
  return (part) => packets.map(({ node, from, to, a, turn, lane }) => {
    const done = clamp((part - from) / Math.max(to - from, 1e-6));
    const [x, y] = point(a + turn * ease(done), SIZE.radius + lane);
    node.setAttribute("transform", `translate(${x} ${y})`);
    node.style.opacity = done <= 0 || done >= 1 ? 0 : Math.min(1, 8 * done, 8 * (1 - done));
    return done >= 1;
  });
}

function drawTrack(svg, ring) {
  for (const lane of ring.directions.length > 1 ? [13, -13] : [0])
    make("svg:circle", { class: "track", cx: SIZE.cx, cy: SIZE.cy, r: SIZE.radius + lane }, svg);
  for (const direction of ring.directions)
    for (let rank = 0; rank < ring.world_size; rank++) {
      const a = angle(rank + 0.5, ring.world_size);
      const [x, y] = point(a, SIZE.radius + (ring.directions.length > 1 ? 13 * direction : 0));
      const turn = (a * 180) / Math.PI + 90 * direction;
      make("svg:path", { class: "chevron", d: "M-4,-5 L4,0 L-4,5", transform: `translate(${x} ${y}) rotate(${turn})` }, svg);
    }
}

function legend(side) {
  const list = make("ul", { class: "legend" }, side);
  for (const [name, text] of [["part", "summed over some ranks; the number says how many"], ["whole", "summed over all ranks"]]) {
    const item = make("li", {}, list);
    make("span", { class: `swatch ${name}` }, item);
    item.append(text);
  }
}

function render({ model, el }) {
  const still = window.matchMedia("(prefers-reduced-motion: reduce)");
  const root = make("div", { class: "shardscope-ring", role: "group", "aria-label": "Ring all-reduce, chunk by chunk" }, el);
  let scene = null;
  let last = null;
  let frame = 0;

  const rounds = () => model.get("ring").rounds?.length ?? 0;
  const position = () => Math.min(model.get("position"), rounds());

  function build() {
    root.replaceChildren();
    scene = null;
    const ring = model.get("ring");
    if (!rounds()) {
      make("p", { class: "empty" }, root, model.get("empty"));
      return;
    }
    const stage = make("div", { class: "stage" }, root);
    const svg = make("svg:svg", { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, role: "img" }, stage);
    drawTrack(svg, ring);
    const middle = make("svg:g", { class: "middle" }, svg);
    const phase = make("svg:text", { x: SIZE.cx, y: SIZE.cy - 4, class: "phase" }, middle);
    const round = make("svg:text", { x: SIZE.cx, y: SIZE.cy + 18, class: "round" }, middle);
    const fill = drawRanks(svg, ring);
    const layer = make("svg:g", {}, svg);
    const side = make("div", { class: "side" }, stage);
    const title = make("h4", {}, side);
    const words = make("p", {}, side);
    const list = make("ol", { class: "transfers" }, side);
    legend(side);
    scene = { ring, svg, phase, round, fill, layer, title, words, list, shown: -1, move: null, ...controls() };
    draw();
  }

  function controls() {
    const bar = make("div", { class: "bar" }, root);
    const button = (label, symbol, act) => {
      const node = make("button", { type: "button", title: label, "aria-label": label }, bar, symbol);
      node.addEventListener("click", act);
      return node;
    };
    button("Previous round", "‹", () => jump(Math.ceil(position()) - 1));
    const play = button("Play", "▶", () => set({ playing: !model.get("playing") }));
    button("Next round", "›", () => jump(Math.floor(position()) + 1));
    const slider = make("input", { type: "range", min: 0, max: rounds(), step: 0.01, "aria-label": "Position in rounds" }, bar);
    slider.addEventListener("input", () => set({ playing: false, position: Number(slider.value) }));
    slider.addEventListener("keydown", (event) => {
      const way = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (!way) return;
      event.preventDefault();
      jump(way > 0 ? Math.floor(position()) + 1 : Math.ceil(position()) - 1);
    });
    picker(bar, "Step", model.get("steps"), "step", String);
    if (model.get("ring").num_buckets > 1)
      picker(bar, "Bucket", [...Array(model.get("ring").num_buckets).keys()], "bucket", (n) => String(n + 1));
    return { play, slider };
  }

  function picker(bar, text, values, trait, name) {
    const label = make("label", {}, bar, text);
    const select = make("select", { "aria-label": text }, label);
    for (const value of values) make("option", { value }, select, name(value));
    select.value = model.get(trait);
    select.addEventListener("change", () => set({ [trait]: Number(select.value), position: 0 }));
  }

  function set(values) {
    for (const [key, value] of Object.entries(values)) model.set(key, value);
    model.save_changes();
  }

  const jump = (to) => set({ playing: false, position: Math.min(rounds(), Math.max(0, to)) });

  function draw() {
    if (!scene) return;
    const { ring } = scene;
    const now = position();
    const k = Math.min(Math.floor(now), rounds() - 1);
    if (k !== scene.shown) say(k);
    const arrived = scene.move(still.matches && now - k > 0 && now - k < 1 ? 0.5 : now - k);
    const counts = now >= k + 1 ? ring.counts[k + 1] : partly(ring, k, arrived);
    scene.fill(counts);
    scene.slider.value = now;
    scene.slider.setAttribute("aria-valuetext", ring.captions[k].title);
    const playing = model.get("playing");
    scene.play.textContent = playing ? "❚❚" : "▶";
    for (const name of ["title", "aria-label"]) scene.play.setAttribute(name, playing ? "Pause" : "Play");
  }

  function partly(ring, k, arrived) {
    const counts = structuredClone(ring.counts[k]);
    ring.rounds[k].forEach((t, index) => {
      const row = ring.directions.indexOf(t.direction);
      if (arrived[index]) counts[row][t.target][t.chunk] = ring.counts[k + 1][row][t.target][t.chunk];
    });
    return counts;
  }

  function say(k) {
    const { captions, rounds: all } = scene.ring;
    scene.shown = k;
    scene.move = drawPackets(scene.layer, scene.ring, all[k]);
    scene.phase.textContent = captions[k].phase;
    scene.round.textContent = captions[k].round;
    scene.title.textContent = captions[k].title;
    scene.words.textContent = captions[k].words;
    scene.list.replaceChildren(...captions[k].transfers.map((text) => make("li", {}, null, text)));
    scene.svg.setAttribute("aria-label", `${captions[k].title}. ${captions[k].transfers.join(". ")}`);
  }

  function tick(time) {
    frame = 0;
    if (!model.get("playing") || !scene) { last = null; return; }
    const passed = last === null ? 0 : (time - last) / 1000 / SECONDS_A_ROUND;
    last = time;
    const next = position() + passed * model.get("speed");
    const end = next >= rounds();
    model.set("position", end ? rounds() : next);
    if (end) model.set("playing", false);
    if (end) model.save_changes();
    draw();
    frame = requestAnimationFrame(tick);
  }

  function onPlaying() {
    if (model.get("playing") && position() >= rounds()) model.set("position", 0);
    if (model.get("playing") && !frame) { last = null; frame = requestAnimationFrame(tick); }
    draw();
  }

  model.on("change:ring change:steps", build);
  model.on("change:position", draw);
  model.on("change:playing", onPlaying);
  build();
  onPlaying();
  return () => {
    cancelAnimationFrame(frame);
    model.off("change:ring change:steps", build);
    model.off("change:position", draw);
    model.off("change:playing", onPlaying);
  };
}

export default { render };
