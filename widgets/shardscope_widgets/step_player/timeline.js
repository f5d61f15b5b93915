/* Draws what each rank does, and below it the memory of one rank, once per size and theme; a frame only adds the cursor.
 *
 * If a second step is shown, such as the measured one below the predicted one, both are drawn on the same axis.
 */

const LEFT = 56;
const TITLE = 17, MEMORY = 64, AXIS = 20;

const rowHeight = (n, several) => (n <= 4 ? (several ? 18 : 26) : n <= 8 ? (several ? 13 : 20) : n <= 16 ? (several ? 8 : 12) : several ? 4 : 6);

/** Return where the rows of each step, the memory and the axis are; `shown` of the last step's rows are in view. */
function timeLayout(steps, shown = 1) {
  const several = steps.length > 1, h = rowHeight(steps[0].world_size, several), title = several ? TITLE : 0;
  const blocks = [];
  let y = 0;
  steps.forEach((step, k) => {
    const room = title + step.world_size * h + (several ? 3 : 6);
    blocks.push({ step, y, top: y + title, h, room });
    y += room * (k ? shown : 1);
  });
  const memory = steps.some((step) => step.memory.length) ? { y: y + 4, h: MEMORY } : null;
  if (memory) y += MEMORY + 6;
  return { blocks, memory, axis: y, height: y + AXIS, duration: Math.max(...steps.map((step) => step.duration)) };
}

function bar(ctx, look, e, x, y, w, h) {
  ctx.fillStyle = look.kind(e.kind);
  ctx.fillRect(x, y, w, h);
  const word = plain(e.kind).replace("backward for ", "");
  if (w > 3 && look.hatched(e.kind)) {
    ctx.save();
    ctx.beginPath();
    ctx.rect(x, y, w, h);
    ctx.clip();
    ctx.strokeStyle = "rgba(255,255,255,0.6)";
    ctx.lineWidth = 1;
    ctx.beginPath();
    for (let at = x - h; at < x + w; at += 6) { ctx.moveTo(at, y + h); ctx.lineTo(at + h, y); }
    ctx.stroke();
    ctx.restore();
  }
  const label = h >= 11 && e.lane !== "communication" ? (w > 7 * word.length ? word : w > 12 ? chunkOf(e) || short(e.kind) : "") : "";
  if (label) {
    ctx.fillStyle = look.inkOn(look.kind(e.kind));
    ctx.font = `10.5px ${look.font}`;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.fillText(label, x + w / 2, y + h / 2 + 0.5);
  }
}

/** Draw the rows of all steps, the memory of a rank and the axis. */
function drawTimeline(ctx, steps, played, rank, look, width, layout) {
  const scale = (width - LEFT - 6) / layout.duration, x = (t) => LEFT + t * scale;
  ctx.clearRect(0, 0, width, layout.height);
  for (const [k, block] of layout.blocks.entries()) {
    ctx.save();
    ctx.beginPath();
    ctx.rect(0, block.y, width, (layout.blocks[k + 1]?.y ?? layout.memory?.y ?? layout.axis) - block.y);
    ctx.clip();
    drawBlock(ctx, block, look, x, width, layout.blocks);
    ctx.restore();
  }
  if (layout.memory) drawMemory(ctx, steps, played, rank, look, x, width, layout.memory);
  drawAxis(ctx, layout, look, x);
}

function drawBlock(ctx, { step, y, top, h }, look, x, width, blocks) {
  const n = step.world_size;
  ctx.textBaseline = "middle";
  if (top > y) {
    ctx.font = `600 11.5px ${look.font}`;
    ctx.textAlign = "left";
    ctx.fillStyle = look.ink;
    const first = blocks[0].step, gap = Math.round(100 * (step.duration / first.duration - 1));
    ctx.fillText(`${step.origin}: ${timeText(step.duration)}${step === first ? "" : gap ? `, ${Math.abs(gap)} % ${gap > 0 ? "longer" : "shorter"}` : ", as predicted"}`, LEFT, y + TITLE / 2);
  }
  for (let rank = 0; rank < n; rank++) {
    ctx.fillStyle = rank % 2 ? look.track : look.stripe;
    ctx.fillRect(LEFT, top + rank * h, width - LEFT - 6, h);
    if (n > 8 && rank % (n > 16 ? 8 : 2)) continue;
    ctx.fillStyle = look.ink;
    ctx.font = `11px ${look.font}`;
    ctx.textAlign = "right";
    ctx.fillText(`rank ${rank}`, LEFT - 7, top + Math.max(5, rank * h + h / 2));
  }
  const upper = Math.round(h * 0.58), lower = h - upper - 2;
  for (const e of step.spans) {
    const isBelow = e.lane === "communication", w = Math.max(x(e.end) - x(e.start), 0.7);
    bar(ctx, look, e, x(e.start), top + e.rank * h + 1 + (isBelow ? upper : 0), w, isBelow ? lower : upper);
  }
  if (n <= 8 && step.messages.length <= 600) drawArrows(ctx, step, look, x, top, h);
  ctx.fillStyle = look.ink;
  if (blocks.length > 1) ctx.fillRect(x(step.duration) - 0.75, top, 1.5, n * h);
}

function drawArrows(ctx, step, look, x, top, h) {
  ctx.lineWidth = 1;
  ctx.globalAlpha = 0.6;
  ctx.strokeStyle = look.ink;
  for (const m of step.messages) {
    if (isControl(m)) continue;
    ctx.beginPath();
    ctx.moveTo(x(m.start), top + m.rank * h + h * 0.8);
    ctx.lineTo(x(m.end), top + m.peer * h + h * 0.8);
    ctx.stroke();
  }
  ctx.globalAlpha = 1;
}

/** Draw the memory of a rank as a stacked area; that of the other steps as lines. */
function drawMemory(ctx, steps, played, rank, look, x, width, { y, h }) {
  const most = Math.max(...steps.map((step) => step.mostMemory)), up = (bytes) => y + h - ((h - 4) * bytes) / most;
  const corners = (step, height) => {
    const points = step.memoryOf[rank] ?? [], line = [];
    points.forEach((point, k) => { line.push([x(point[1]), height(point)], [x(points[k + 1]?.[1] ?? step.duration), height(point)]); });
    return line;
  };
  const sum = (point, kinds) => point.slice(2, 2 + kinds).reduce((a, b) => a + b, 0);
  ctx.fillStyle = look.stripe;
  ctx.fillRect(LEFT, y, width - LEFT - 6, h);
  played.memory_kinds.forEach((kind, k) => {
    const top = corners(played, (point) => up(sum(point, k + 1))), low = corners(played, (point) => up(sum(point, k))).reverse();
    ctx.fillStyle = look.memory[kind];
    ctx.beginPath();
    for (const [px, py] of [...top, ...low]) ctx.lineTo(px, py);
    ctx.fill();
  });
  ctx.strokeStyle = look.ink;
  ctx.lineWidth = 1.5;
  ctx.setLineDash([4, 3]);
  for (const step of steps) {
    if (step === played) continue;
    ctx.beginPath();
    for (const [px, py] of corners(step, (point) => up(sum(point, step.memory_kinds.length)))) ctx.lineTo(px, py);
    ctx.stroke();
  }
  ctx.setLineDash([]);
  ctx.fillStyle = look.ink;
  ctx.font = `11px ${look.font}`;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  [["memory", look.ink], [`rank ${rank}`, look.faint], [bytesText(most), look.faint]].forEach(([text, colour], k) => {
    ctx.fillStyle = colour;
    ctx.fillText(text, LEFT - 6, y + 10 + k * 15);
  });
}

function drawAxis(ctx, layout, look, x) {
  const rough = layout.duration / 6, power = 10 ** Math.floor(Math.log10(rough)), top = layout.axis;
  const tick = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough);
  ctx.fillStyle = look.faint;
  ctx.font = `11px ${look.font}`;
  ctx.textBaseline = "middle";
  for (let t = 0; t <= layout.duration * 0.97; t += tick) {
    ctx.fillRect(x(t), top, 1, 4);
    ctx.textAlign = t ? "center" : "left";
    ctx.fillText(t ? timeText(t) : "0", x(t), top + 12);
  }
}

/** Return the event of the played step below a point of the timeline, or null. */
function timelineHit(layout, played, width, px, py) {
  const block = layout.blocks.find(({ step }) => step === played), { h, step } = block, rank = Math.floor((py - block.top) / h);
  const t = ((px - LEFT) / (width - LEFT - 6)) * layout.duration;
  if (rank < 0 || rank >= step.world_size || t < 0) return null;
  const slack = layout.duration / (width - LEFT) / 2;
  const own = step.spans.filter((e) => e.rank === rank && e.start - slack <= t && t <= e.end + slack);
  const wanted = own.filter((e) => (e.lane === "communication") === (py - block.top - rank * h > h * 0.6));
  return (wanted.length ? wanted : own).sort((a, b) => a.end - a.start - (b.end - b.start))[0] ?? null;
}
