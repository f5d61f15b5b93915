/* Draws one row for each rank with everything that it does, once per size and theme; a frame only adds the cursor. */

const LEFT = 52;

function rowHeight(n) {
  return n <= 8 ? 30 : n <= 16 ? 16 : 6;
}
const timelineHeight = (step) => step.world_size * rowHeight(step.world_size) + 26;

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

/** Draw all rows of the timeline. */
function drawTimeline(ctx, step, look, width) {
  const n = step.world_size, h = rowHeight(n), scale = (width - LEFT - 6) / step.duration;
  const x = (t) => LEFT + t * scale;
  ctx.clearRect(0, 0, width, timelineHeight(step));
  ctx.textBaseline = "middle";
  for (let rank = 0; rank < n; rank++) {
    ctx.fillStyle = rank % 2 ? look.track : look.stripe;
    ctx.fillRect(LEFT, rank * h, width - LEFT - 6, h);
    if (n > 16 && rank % 8) continue;
    ctx.fillStyle = look.ink;
    ctx.font = `11px ${look.font}`;
    ctx.textAlign = "right";
    ctx.fillText(`rank ${rank}`, LEFT - 7, Math.max(7, rank * h + h / 2));
  }
  const upper = n <= 8 ? 17 : n <= 16 ? 9 : 4, lower = h - upper - 2;
  for (const e of step.spans) {
    const isBelow = e.lane === "communication", w = Math.max((e.end - e.start) * scale, 0.7);
    bar(ctx, look, e, x(e.start), e.rank * h + 1 + (isBelow ? upper : 0), w, isBelow ? lower : upper);
  }
  if (n <= 8 && step.messages.length <= 600) drawArrows(ctx, step, look, x, h);
  drawAxis(ctx, step, look, x, n * h);
}

function drawArrows(ctx, step, look, x, h) {
  ctx.lineWidth = 1;
  ctx.globalAlpha = 0.75;
  for (const m of step.messages) {
    if (isControl(m)) continue;
    ctx.strokeStyle = look.ink;
    ctx.beginPath();
    ctx.moveTo(x(m.start), m.rank * h + h - 6);
    ctx.lineTo(x(m.end), m.peer * h + h - 6);
    ctx.stroke();
  }
  ctx.globalAlpha = 1;
}

function drawAxis(ctx, step, look, x, top) {
  const rough = step.duration / 6, power = 10 ** Math.floor(Math.log10(rough));
  const tick = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough);
  ctx.fillStyle = ctx.strokeStyle = look.faint;
  ctx.font = `11px ${look.font}`;
  ctx.textAlign = "center";
  for (let t = 0; t <= step.duration * 0.97; t += tick) {
    ctx.fillRect(x(t), top, 1, 4);
    ctx.textAlign = t ? "center" : "left";
    ctx.fillText(t ? timeText(t) : "0", x(t), top + 14);
  }
}

/** Return the event below a point of the timeline, or null. */
function timelineHit(step, width, px, py) {
  const h = rowHeight(step.world_size), rank = Math.floor(py / h);
  const t = ((px - LEFT) / (width - LEFT - 6)) * step.duration;
  if (rank < 0 || rank >= step.world_size || t < 0) return null;
  const slack = step.duration / (width - LEFT) / 2;
  const own = step.spans.filter((e) => e.rank === rank && e.start - slack <= t && t <= e.end + slack);
  const upper = step.world_size <= 8 ? 18 : h * 0.6;
  const wanted = own.filter((e) => (e.lane === "communication") === (py - rank * h > upper));
  return (wanted.length ? wanted : own).sort((a, b) => a.end - a.start - (b.end - b.start))[0] ?? null;
}
