/* The step player: ranks and messages above, a timeline below, and controls between them.
 *
 * `position` runs from 0 to 1 over the playback; `data.js` maps it to a time of the step. The model needs only `get`,
 * `set`, `save_changes`, `on` and `off`, so the same code plays in a notebook and in a page of its own.
 */

const SECONDS = 24;
const SYNC_MS = 250;
const SPEEDS = [0.25, 0.5, 1, 2, 4];
const MOST_LINES = 5;

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
    track: value("--ss-track"), stripe: value("--ss-stripe"), font: style.fontFamily, memory: step.memory_looks, kind,
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

class Player {
  constructor(model, el) {
    this.model = model;
    this.still = window.matchMedia("(prefers-reduced-motion: reduce)");
    this.root = make("div", { class: "ss-step", role: "group", tabindex: "0" }, el);
    this.frames = [];
    this.synced = 0;
    this.onKey = this.onKey.bind(this);
    this.tick = this.tick.bind(this);
    this.load();
    this.root.addEventListener("keydown", this.onKey);
    this.changes = { events: () => { this.load(); this.switched(); }, position: () => this.moved(), playing: () => this.switched(), selected: () => this.moved(), speed: () => this.showSpeed() };
    for (const [name, act] of Object.entries(this.changes)) model.on(`change:${name}`, act);
    this.resize = new ResizeObserver(() => this.fit());
    this.resize.observe(this.root);
    this.themes = new MutationObserver(() => { this.look = null; this.fit(); });
    for (const node of [document.documentElement, document.body]) this.themes.observe(node, { attributes: true });
    this.dark = window.matchMedia("(prefers-color-scheme: dark)");
    this.onDark = () => { this.look = null; this.fit(); };
    this.dark.addEventListener("change", this.onDark);
    this.switched();
  }

  close() {
    cancelAnimationFrame(this.frame);
    this.resize.disconnect();
    this.themes.disconnect();
    this.dark.removeEventListener("change", this.onDark);
    for (const [name, act] of Object.entries(this.changes)) this.model.off(`change:${name}`, act);
  }

  // Building the page.

  load() {
    const raw = this.model.get("events");
    this.root.replaceChildren();
    this.hits = [];
    this.hovered = this.pointed = this.spoken = null; // they belong to the step before
    this.step = raw.events?.length ? readStep(raw) : null;
    if (!this.step) {
      make("p", { class: "empty" }, this.root, this.model.get("empty"));
      return;
    }
    const { step } = this;
    const words = `One training step, ${step.origin}: ${step.label}`;
    this.root.setAttribute("aria-label", `${words}. Space plays, arrow keys move between events.`);
    this.title = make("div", { class: "title" }, this.root);
    make("strong", { class: "name" }, this.title, step.label);
    make("span", { class: `origin ${step.origin}` }, this.title, step.origin);
    make("span", { class: "about" }, this.title, `step ${step.step}, ${timeText(step.duration)}, ${step.messages.length} messages, ${bytesText(step.events.reduce((sum, e) => sum + e.bytes, 0))} sent`);
    const top = make("div", { class: "top" }, this.root);
    this.stage = canvasIn(make("div", { class: "stage" }, top), `${step.world_size} ranks, their memory and their messages`);
    this.side = make("div", { class: "side" }, top);
    this.now = make("div", { class: "now" }, this.side);
    this.legend(this.side);
    this.controls();
    this.time = canvasIn(make("div", { class: "time" }, this.root), `Timeline of ${step.world_size} ranks`);
    this.cursor = make("div", { class: "cursor", "aria-hidden": "true" }, this.time.node.parentNode);
    if (step.note) make("p", { class: "note" }, this.root, step.note);
    this.pointer();
    this.edges = edgesOf(step);
    this.look = null;
    this.fit();
  }

  legend(parent) {
    const list = make("ul", { class: "legend", "aria-label": "Colours" }, parent);
    const item = (colour, text, className = "") => {
      const entry = make("li", {}, list);
      make("span", { class: `swatch ${className}`, style: `background:${colour}` }, entry);
      entry.append(text);
    };
    const held = this.step.memory_kinds.filter((_, k) => this.step.memory.some((point) => point[k + 2] > 0));
    for (const kind of held) item(this.step.memory_looks[kind], kind, "bar");
    if (held.length) make("li", { class: "scale" }, list, `full bar: ${bytesText(this.step.mostMemory)}, the most that a rank holds at once`);
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
    this.play = button("Play (space)", "▶", () => this.set({ playing: !this.model.get("playing") }));
    this.play.className = "play";
    button("Next event (right arrow)", "▶|", () => this.next(1));
    this.slider = make("input", { type: "range", min: 0, max: 1, step: 0.0001, "aria-label": "Position in the step" }, bar);
    this.slider.addEventListener("input", () => this.jump(Number(this.slider.value)));
    this.clock = make("output", { class: "clock" }, bar);
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
    const onTime = (event) => timelineHit(this.step, this.width.time, ...spot(event));
    const seek = (event) => this.jump(this.step.clock.position(clamp((spot(event)[0] - LEFT) / (this.width.time - LEFT - 6)) * this.step.duration));
    time.addEventListener("pointermove", (event) => (event.buttons ? seek(event) : this.hover(onTime(event))));
    time.addEventListener("pointerdown", (event) => { time.setPointerCapture(event.pointerId); seek(event); this.choose(onTime(event)); });
    for (const node of [this.stage.node, time]) node.addEventListener("pointerleave", () => this.hover(null));
  }

  stageHit(x, y) {
    const packet = this.hits.findLast((hit) => Math.hypot(hit.x - x, hit.y - y) <= hit.r + 3);
    if (packet) return packet.event;
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
      " ": () => this.set({ playing: !this.model.get("playing") }), ArrowRight: () => this.next(1), ArrowLeft: () => this.next(-1),
      Home: () => this.jump(0), End: () => this.jump(1),
    };
    if (!acts[event.key] || (event.key === " " && event.target.tagName === "BUTTON")) return;
    event.preventDefault();
    event.stopPropagation();
    acts[event.key]();
  }

  switched() {
    if (!this.step) return;
    const playing = this.model.get("playing");
    this.play.textContent = playing ? "❚❚" : "▶";
    for (const name of ["title", "aria-label"]) this.play.setAttribute(name, playing ? "Pause (space)" : "Play (space)");
    cancelAnimationFrame(this.frame);
    if (!playing) { this.say(); return; }
    if (this.model.get("position") >= 1) this.model.set("position", 0);
    this.before = null;
    this.frame = requestAnimationFrame(this.tick);
  }

  tick(now) {
    const passed = this.before === null ? 0 : Math.min(now - this.before, 100);
    if (this.before !== null && this.frames.length < 20000) this.frames.push(now - this.before);
    this.before = now;
    const pace = (passed / 1000 / SECONDS) * this.model.get("speed");
    const position = Math.min(1, this.model.get("position") + pace);
    this.model.set("position", position);
    if (now - this.synced > SYNC_MS) { this.synced = now; this.model.save_changes(); }
    if (position >= 1) { this.set({ playing: false }); return; }
    this.frame = requestAnimationFrame(this.tick);
  }

  moved() {
    if (!this.step) return;
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
    this.time.size(this.width.time, timelineHeight(this.step));
    this.cursor.style.height = `${timelineHeight(this.step) - 24}px`;
    this.look ??= readLook(this.root, this.step);
    drawTimeline(this.time.ctx, this.step, this.look, this.width.time);
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

  draw() {
    if (!this.step || !this.look || !this.layout) return;
    const { step, layout, look } = this, { ctx } = this.stage, t = this.at, selected = this.model.get("selected");
    ctx.clearRect(0, 0, this.width.stage, layout.height);
    drawEdges(ctx, step, layout, look, this.edges);
    const doing = this.doing(t), chosen = step.events[selected];
    for (let rank = 0; rank < step.world_size; rank++) drawRank(ctx, step, layout, look, rank, doing[rank], t, chosen?.rank === rank);
    this.hits = step.at[0](t).map((e) => drawMessage(ctx, step, layout, look, e, t, e.index === selected, this.still.matches));
    const part = t / step.duration;
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
    if (shown) lines.push(["chosen", shown.waits ? `Rank ${shown.rank} waits.` : sentence(step, shown)]);
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
    if (t >= this.step.duration * 0.9999) return "The step is over.";
    const counts = new Map();
    const doing = this.doing(t);
    for (let rank = 0; rank < this.step.world_size; rank++) {
      const e = doing[rank], what = !e ? "waiting" : e.lane === "communication" ? "exchanging" : e.kind.startsWith("backward") ? "in the backward pass" : e.kind === "forward" ? "in the forward pass" : e.kind === "optimizer" || e.kind === "server_update" ? "updating parameters" : e.kind === "data" ? "reading the batch" : `busy with ${plain(e.kind)}`;
      counts.set(what, (counts.get(what) ?? 0) + 1);
    }
    const parts = [...counts].map(([what, count]) => (count === this.step.world_size ? `all ranks ${what}` : `${count} ${what}`));
    return `${capital(parts.join(", "))}.`;
  }
}

function render({ model, el }) {
  const player = new Player(model, el);
  el.player = player; // for tests: frame times and state
  return () => player.close();
}
