/* The step player: controls, ranks and messages, and a timeline with memory below.
 *
 * `position` runs from 0 to 1 over the playback; `data.js` maps it to a time of the step. `measured` is a second step,
 * drawn below the first one on the same axis; `plays` says which of them the ranks show. The model needs only `get`,
 * `set`, `save_changes`, `on` and `off`, so the same code plays in a notebook and in a page of its own.
 */

const SECONDS = 12;
const HOLD_MS = 1200;
const FRAME_MS = 30;
const REVEAL_MS = 600;
const SPEEDS = [0.25, 0.5, 1, 2, 4];
const MOST_LINES = 2;

function make(tag, attributes, parent, text) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes ?? {})) node.setAttribute(key, value);
  if (text) node.textContent = text;
  parent?.append(node);
  return node;
}

/** Read the theme's colours from the CSS variables of the root. */
function readLook(root, step) {
  const style = getComputedStyle(root), value = (name) => style.getPropertyValue(name).trim();
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (hex) => [1, 3, 5].map((i) => linear(parseInt(hex.slice(i, i + 2), 16) / 255)).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const looks = step.looks;
  const kind = (name) => (looks[name] ?? looks[name.split(" ")[0]] ?? ["#8b8f99"])[0];
  return {
    ink: value("--ss-ink"), faint: value("--ss-faint"), line: value("--ss-line"), card: value("--ss-card"),
    track: value("--ss-track"), stripe: value("--ss-stripe"), font: style.fontFamily, memory: step.memory_looks, axes: step.axis_looks, kind,
    hatched: (name) => Boolean((looks[name] ?? [])[1]),
    inkOn: (hex) => (hex[0] === "#" && light(hex) > 0.179 ? "#10151b" : "#ffffff"),
    cargo: (item) => (/param/.test(item) ? "#2a86d1" : /activ/.test(item) ? "#b866a6" : "#e06c2c"),
  };
}

/** Return a canvas that follows the width of its box and the resolution of the screen. */
function canvasIn(parent, label) {
  const node = make("canvas", { role: "img", "aria-label": label }, parent);
  const ctx = node.getContext("2d", { alpha: true });
  const size = (width, height) => {
    const ratio = window.devicePixelRatio || 1;
    node.width = Math.round(width * ratio);
    node.height = Math.round(height * ratio);
    node.style.height = `${height}px`;
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  };
  return { node, ctx, size };
}

const ABOUT = {
  activations: "tensors kept for the backward pass",
  buffers: "message buffers, padding, and temporary tensors of the optimizer",
  gathered: "temporary copies of parameters of other ranks",
};
const CELLS = {
  gradients: (step) => `${step.cellsOf[0].gradients.length > 1 ? "Each cell is a chunk of the rank's gradients" : "The cell is the rank's gradients"}: 1/${step.num_summed} full once computed, full (✓) once summed over ${step.axes.length ? "its data group" : "all ranks"}, hatched once passed on.`,
  parameters: () => "Each lower cell is a chunk of the parameters, full while the rank holds it.",
  "micro-batches": () => "Each cell is a micro-batch: half full after its forward pass, full after its backward pass.",
};

class Player {
  constructor(model, el) {
    this.model = model;
    this.still = window.matchMedia("(prefers-reduced-motion: reduce)");
    this.root = make("div", { class: "ss-step", role: "group", tabindex: "0" }, el);
    this.frames = [];
    this.isInView = true;
    this.onKey = this.onKey.bind(this);
    this.tick = this.tick.bind(this);
    this.load();
    this.root.addEventListener("keydown", this.onKey);
    this.endKeys = keepKeys(this.root); // in the kit's keys.js
    this.changes = { events: () => this.renew(), measured: () => this.renew(), plays: () => this.renew(), note: () => { if (this.note) this.note.textContent = this.model.get("note"); }, position: () => this.moved(), playing: () => this.switched(), selected: () => this.moved(), speed: () => this.showSpeed() };
    for (const [name, act] of Object.entries(this.changes)) model.on(`change:${name}`, act);
    this.resize = new ResizeObserver(() => this.fit());
    this.resize.observe(this.root);
    this.sight = new IntersectionObserver(([entry]) => { this.isInView = entry.isIntersecting; this.run(); });
    this.sight.observe(this.root);
    this.themes = new MutationObserver(() => { this.look = null; this.fit(); });
    for (const node of [document.documentElement, document.body]) this.themes.observe(node, { attributes: true });
    this.dark = window.matchMedia("(prefers-color-scheme: dark)");
    this.onDark = () => { this.look = null; this.fit(); };
    this.dark.addEventListener("change", this.onDark);
    this.switched();
  }

  close() {
    this.endKeys();
    cancelAnimationFrame(this.frame);
    this.resize.disconnect();
    this.sight.disconnect();
    this.themes.disconnect();
    this.dark.removeEventListener("change", this.onDark);
    for (const [name, act] of Object.entries(this.changes)) this.model.off(`change:${name}`, act);
  }

  // Building the page.

  /** Show other steps: from the start if it is another job, else from where the last one was. */
  renew() {
    const before = this.steps?.[0]?.label, had = this.steps?.length;
    this.load();
    if (this.step && before !== this.steps[0].label) this.model.set("position", 0);
    if (had === 1 && this.steps.length === 2 && !this.still.matches) this.reveal(performance.now());
    this.switched();
  }

  /** Let the measured step slide in below the predicted one. */
  reveal(from) {
    const part = clamp((performance.now() - from) / REVEAL_MS);
    this.shown = 1 - (1 - part) ** 3;
    this.fit();
    if (part < 1) requestAnimationFrame(() => this.reveal(from));
  }

  load() {
    const focused = this.root.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    this.root.replaceChildren();
    this.hits = this.boxes = [];
    this.hovered = this.pointed = this.spoken = null; // they belong to the step before
    this.steps = [this.model.get("events"), this.model.get("measured")].filter((raw) => raw?.events?.length).map(readStep);
    this.step = this.steps[Math.min(this.model.get("plays"), this.steps.length - 1)] ?? null;
    this.shown = 1;
    if (!this.step) {
      make("p", { class: "empty" }, this.root, this.model.get("empty"));
      return;
    }
    const { step } = this;
    this.duration = Math.max(...this.steps.map((each) => each.duration));
    const words = `One training step, ${step.origin}: ${step.label}`;
    this.root.setAttribute("aria-label", `${words}. Space plays, arrow keys move between events.`);
    this.title = make("div", { class: "title" }, this.root);
    make("strong", { class: "name" }, this.title, step.label);
    if (this.steps.length === 1) make("span", { class: `origin ${step.origin}` }, this.title, step.origin);
    make("span", { class: "about" }, this.title, `step of ${timeText(step.duration)}; all ranks together send ${step.messages.length} messages, ${bytesText(step.events.reduce((sum, e) => sum + e.bytes, 0))}`);
    this.controls();
    const top = make("div", { class: "top" }, this.root);
    this.stage = canvasIn(make("div", { class: "stage" }, top), `${step.world_size} ranks, what each holds, and their messages`);
    this.side = make("div", { class: "side" }, top);
    this.now = make("div", { class: "now" }, this.side);
    this.legend(this.side);
    this.time = canvasIn(make("div", { class: "time" }, this.root), `Timeline of ${step.world_size} ranks, ${this.steps.map((each) => each.origin).join(" and ")}, and memory of a rank`);
    this.cursor = make("div", { class: "cursor", "aria-hidden": "true" }, this.time.node.parentNode);
    this.note = make("p", { class: "note" }, this.root, this.model.get("note"));
    const notes = this.steps.map((each) => each.note && `${capital(each.origin)}: ${each.note}`).filter(Boolean);
    if (notes.length) {
      const about = make("details", { class: "note" }, this.root);
      make("summary", {}, about, "Limits of this view");
      for (const note of notes) make("p", {}, about, note);
    }
    this.pointer();
    this.edges = edgesOf(step);
    this.look = null;
    this.fit();
    if (focused) this.root.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
  }

  legend(parent) {
    const list = make("ul", { class: "legend", "aria-label": "Colours" }, parent);
    const item = (colour, text, className = "") => {
      const entry = make("li", ABOUT[text] ? { title: ABOUT[text] } : {}, list);
      make("span", { class: `swatch ${className}`, style: `background:${colour}` }, entry);
      entry.append(text);
    };
    const kinds = Object.keys(this.step.cellsOf[0]);
    const held = this.step.memory_kinds.filter((_, k) => this.step.memory.some((point) => point[k + 2] > 0));
    if (kinds.length) make("li", { class: "scale" }, list, kinds.map((what) => CELLS[what](this.step)).join(" "));
    const axes = this.step.axes.filter((axis) => axis.size > 1);
    if (axes.length) make("li", { class: "scale" }, list, "Links by axis, bold while in use:");
    for (const { name } of axes) item(this.step.axis_looks[name], name, "bar");
    if (held.length) make("li", { class: "scale" }, list, "Memory:");
    for (const kind of held) item(this.step.memory_looks[kind], kind, "bar");
  }

  controls() {
    const bar = make("div", { class: "bar" }, this.root);
    const button = (label, symbol, act) => {
      const node = make("button", { type: "button", title: label, "aria-label": label }, bar, symbol);
      node.addEventListener("click", act);
      return node;
    };
    button("To the start (Home)", "|◀", () => this.jump(0));
    button("Previous event (left arrow)", "◀", () => this.next(-1));
    this.play = button("Play (space)", "▶", () => this.toggle());
    this.play.className = "play";
    button("Next event (right arrow)", "▶|", () => this.next(1));
    this.slider = make("input", { type: "range", min: 0, max: 1, step: 0.0001, "aria-label": "Position in the step" }, bar);
    this.slider.addEventListener("input", () => this.jump(Number(this.slider.value)));
    this.clock = make("output", { class: "clock" }, bar);
    if (this.steps.length > 1) {
      const which = make("span", { class: "which", role: "group", "aria-label": "Step that the ranks show" }, bar);
      this.steps.forEach((step, k) => {
        const pick = make("button", { type: "button", "aria-pressed": step === this.step, "aria-label": `Play the ${step.origin} step` }, which, step.origin);
        pick.addEventListener("click", () => this.set({ plays: k }));
      });
    }
    const label = make("label", { class: "speed" }, bar, "Speed");
    this.speed = make("select", { "aria-label": "Speed of playback" }, label);
    for (const value of SPEEDS) make("option", { value }, this.speed, `${value}×`);
    this.speed.addEventListener("change", () => this.set({ speed: Number(this.speed.value) }));
    this.showSpeed();
  }

  showSpeed() {
    if (this.speed) this.speed.value = String(this.model.get("speed"));
  }

  pointer() {
    const spot = (event) => { const box = event.currentTarget.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    const onStage = (event) => { const [x, y] = spot(event); return this.stageHit(x, y); };
    this.stage.node.addEventListener("pointermove", (event) => this.hover(onStage(event)));
    this.stage.node.addEventListener("click", (event) => this.choose(onStage(event)));
    const time = this.time.node;
    const onTime = (event) => timelineHit(this.rows, this.step, this.width.time, ...spot(event));
    const seek = (event) => this.jump(this.step.clock.position(clamp((spot(event)[0] - LEFT) / (this.width.time - LEFT - 6)) * this.duration));
    time.addEventListener("pointermove", (event) => (event.buttons ? seek(event) : this.hover(onTime(event))));
    time.addEventListener("pointerdown", (event) => { time.setPointerCapture(event.pointerId); seek(event); this.choose(onTime(event)); });
    for (const node of [this.stage.node, time]) node.addEventListener("pointerleave", () => this.hover(null));
  }

  stageHit(x, y) {
    const packet = this.hits.findLast((hit) => Math.hypot(hit.x - x, hit.y - y) <= hit.r + 3);
    if (packet) return packet.event;
    const box = this.boxes.find((each) => x >= each.x && x <= each.x + each.w && y >= each.y && y <= each.y + each.h);
    if (box) return { index: -1000 - this.boxes.indexOf(box), rank: box.cell.rank, cell: box.cell };
    const { xy, card } = this.layout;
    const rank = xy.findIndex(([cx, cy]) => Math.abs(cx - x) <= card.w / 2 && Math.abs(cy - y) <= card.h / 2);
    return rank < 0 ? null : this.doing(this.at)[rank] ?? { index: -2 - rank, rank, waits: true };
  }

  hover(event) {
    const shown = event?.index ?? null;
    if (shown === this.hovered) return;
    this.hovered = shown;
    this.pointed = event;
    this.say();
  }

  choose(event) {
    this.set({ selected: event && event.index >= 0 ? event.index : -1 });
  }

  // Moving in time.

  get at() { return this.step.clock.time(this.model.get("position")); }

  set(values) {
    for (const [key, value] of Object.entries(values)) this.model.set(key, value);
    this.model.save_changes();
  }

  jump(position) { this.set({ playing: false, position: clamp(position) }); }

  next(way) {
    const { stops, clock, duration } = this.step, t = this.at, slack = duration * 1e-6;
    const to = way > 0 ? stops.find((s) => s > t + slack) ?? duration : stops.findLast((s) => s < t - slack) ?? 0;
    this.jump(clock.position(Math.min(to + duration * 1e-7, duration)));
  }

  onKey(event) {
    if (!this.step || event.altKey || event.ctrlKey || event.metaKey || event.target === this.speed) return;
    const acts = {
      " ": () => this.toggle(), ArrowRight: () => this.next(1), ArrowLeft: () => this.next(-1),
      Home: () => this.jump(0), End: () => this.jump(1),
    };
    if (!acts[event.key] || (event.key === " " && event.target.tagName === "BUTTON")) return;
    event.preventDefault();
    event.stopPropagation();
    acts[event.key]();
  }

  toggle() {
    this.isAsked = true;
    this.set({ playing: !this.model.get("playing") });
  }

  switched() {
    if (!this.step) return;
    if (this.model.get("playing") && this.still.matches && !this.isAsked) this.model.set("playing", false);
    const playing = this.model.get("playing");
    this.play.textContent = playing ? "❚❚" : "▶";
    for (const name of ["title", "aria-label"]) this.play.setAttribute(name, playing ? "Pause (space)" : "Play (space)");
    if (!playing) { cancelAnimationFrame(this.frame); this.say(); return; }
    if (this.model.get("position") >= 1) this.model.set("position", 0);
    this.run();
  }

  /** Ask for frames while the step plays and can be seen. */
  run() {
    cancelAnimationFrame(this.frame);
    this.before = this.over = null;
    if (this.step && this.isInView && this.model.get("playing")) this.frame = requestAnimationFrame(this.tick);
  }

  tick(now) {
    this.frame = requestAnimationFrame(this.tick);
    if (this.before !== null && now - this.before < FRAME_MS) return; // real ranks may need this processor
    const passed = this.before === null ? 0 : Math.min(now - this.before, 100);
    if (this.before !== null && this.frames.length < 20000) this.frames.push(now - this.before);
    this.before = now;
    const position = this.model.get("position");
    if (position < 1) this.model.set("position", Math.min(1, position + (passed / 1000 / SECONDS) * this.model.get("speed")));
    else if (now - (this.over ??= now) > HOLD_MS) { this.over = null; this.model.set("position", 0); }
  }

  moved() {
    if (!this.step) return;
    if (this.drawn !== this.memoryRank) this.drawTime();
    this.draw();
    if (!this.model.get("playing")) this.say();
  }

  // Drawing.

  fit() {
    if (!this.step || !this.root.clientWidth) return;
    this.root.classList.toggle("narrow", this.root.clientWidth < 760);
    this.width = { stage: this.stage.node.parentNode.clientWidth, time: this.time.node.parentNode.clientWidth };
    this.layout = places(this.step, this.width.stage);
    this.stage.size(this.width.stage, this.layout.height);
    this.rows = timeLayout(this.steps, this.shown);
    this.time.size(this.width.time, this.rows.height);
    this.cursor.style.height = `${this.rows.axis}px`;
    this.look ??= readLook(this.root, this.step);
    this.drawTime();
    this.draw();
    this.say();
  }

  /** Return what each rank is doing: computation first, or else its part in a collective. */
  doing(t) {
    const found = [];
    for (const e of this.step.at[1](t)) {
      const old = found[e.rank];
      if (!old || (old.lane === "communication" && e.lane !== "communication")) found[e.rank] = e;
    }
    return found;
  }

  /** The rank whose memory is shown: that of the selected event, else the fullest. */
  get memoryRank() {
    return this.step.events[this.model.get("selected")]?.rank ?? this.step.fullest;
  }

  drawTime() {
    if (!this.rows) return;
    this.drawn = this.memoryRank;
    drawTimeline(this.time.ctx, this.steps, this.step, this.drawn, this.look, this.width.time, this.rows);
  }

  draw() {
    if (!this.step || !this.look || !this.layout) return;
    const { step, layout, look } = this, { ctx } = this.stage, t = this.at, selected = this.model.get("selected");
    ctx.clearRect(0, 0, this.width.stage, layout.height);
    drawEdges(ctx, step, layout, look, this.edges);
    if (step.shape === "grid") {
      drawAxes(ctx, step, layout, look, step.at[1](t), step.at[0](t));
      drawIndices(ctx, step, layout, look);
    }
    const doing = this.doing(t), chosen = step.events[selected];
    this.boxes = [];
    for (let rank = 0; rank < step.world_size; rank++) this.boxes.push(...drawRank(ctx, step, layout, look, rank, doing[rank], t, chosen?.rank === rank));
    this.hits = step.at[0](t).map((e) => drawMessage(ctx, step, layout, look, e, t, e.index === selected, this.still.matches));
    const part = t / this.duration;
    this.cursor.style.transform = `translateX(${LEFT + part * (this.width.time - LEFT - 6)}px)`;
    this.slider.value = this.model.get("position");
    const clock = `${timeText(t)} of ${timeText(step.duration)}`;
    if (this.clock.textContent !== clock) { this.clock.textContent = clock; this.slider.setAttribute("aria-valuetext", clock); }
    if (this.model.get("playing") && performance.now() - (this.said ?? 0) > 200) this.say();
  }

  /** Explain the present moment in words, and the event under the pointer or the selected one. */
  say() {
    if (!this.step || !this.now) return;
    this.said = performance.now();
    const { step } = this, t = this.at, shown = this.pointed ?? step.events[this.model.get("selected")];
    const lines = [];
    if (shown) lines.push(["chosen", shown.cell ? cellSentence(step, shown.cell, t) : shown.waits ? `Rank ${shown.rank} waits.` : sentence(step, shown)]);
    lines.push(["summary", this.summary(t)]);
    const flying = step.at[0](t).filter((e) => !isControl(e));
    for (const e of flying.slice(0, MOST_LINES)) lines.push(["flying", sentence(step, e)]);
    if (flying.length > MOST_LINES) lines.push(["more", `and ${flying.length - MOST_LINES} more messages`]);
    const text = JSON.stringify(lines);
    if (text === this.spoken) return;
    this.spoken = text;
    this.now.setAttribute("aria-live", this.model.get("playing") ? "off" : "polite");
    this.now.replaceChildren(...lines.map(([name, words]) => make("p", { class: name }, null, words)));
  }

  summary(t) {
    if (t >= this.step.duration * 0.9999) return "The step is complete.";
    const counts = new Map();
    const doing = this.doing(t);
    for (let rank = 0; rank < this.step.world_size; rank++) {
      const e = doing[rank], what = !e ? "waiting" : e.lane === "communication" ? "communicating" : e.kind.startsWith("backward") ? "in the backward pass" : e.kind === "forward" ? "in the forward pass" : e.kind === "optimizer" || e.kind === "server_update" ? "updating parameters" : e.kind === "data" ? "reading the batch" : `busy with ${plain(e.kind)}`;
      counts.set(what, (counts.get(what) ?? 0) + 1);
    }
    const parts = [...counts].map(([what, count]) => (count === this.step.world_size ? `all ranks ${what}` : `${count} ${count === 1 ? "rank" : "ranks"} ${what}`));
    return `${capital(parts.join(", "))}.`;
  }
}

function render({ model, el }) {
  const player = new Player(model, el);
  el.player = player; // for tests: frame times and state
  return () => player.close();
}
