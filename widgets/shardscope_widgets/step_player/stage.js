/* Draws the ranks, their memory and the travelling messages on a canvas. */

const CHUNKS = ["#2a86d1", "#e08a3c", "#11997a", "#b866a6", "#c49a0c", "#5f6fd6", "#3aa5b5", "#a35a3a"];
const HEIGHT = { ring: 430, tree: 380, star: 430, row: 250 };

/** Return the centres of all ranks and the size of a card, for a canvas of this width. */
function places(step, width) {
  const n = step.world_size;
  const big = n <= 8, height = HEIGHT[step.shape] + (n > 16 && step.shape !== "row" ? (n > 32 ? 270 : 120) : 0) + (step.shape === "row" ? Math.max(0, Math.ceil(n / perRow(n, width)) - 1) * 90 : 0);
  const room = { ring: n, star: n - step.hubs.length, tree: 2 ** Math.floor(Math.log2(n)), row: perRow(n, width) }[step.shape];
  const card = n > 32 ? { w: 23, h: 22 } : n > 16 ? { w: 30, h: 26 } : big ? { w: Math.min(112, Math.max(62, (width / Math.max(room, 4)) * 0.82)), h: 64 } : { w: 54, h: 44 };
  const xy = { ring: circle, tree, star, row }[step.shape](step, width, height, card);
  return { xy, card, height, cx: width / 2, cy: height / 2 };
}

const perRow = (n, width) => Math.min(n, Math.max(2, Math.floor(width / (n > 16 ? 44 : n > 8 ? 78 : 92))));

function around(ranks, width, height, card, xy) {
  const rx = Math.min(width / 2 - card.w / 2 - 14, (height / 2 - card.h / 2) * 1.35), ry = height / 2 - card.h / 2 - 12;
  ranks.forEach((rank, k) => {
    const a = -Math.PI / 2 + (2 * Math.PI * k) / ranks.length;
    xy[rank] = [width / 2 + rx * Math.cos(a), height / 2 + ry * Math.sin(a)];
  });
  return xy;
}

const circle = (step, width, height, card) => around([...Array(step.world_size).keys()], width, height, card, []);

function star(step, width, height, card) {
  const xy = [];
  step.hubs.forEach((rank, k) => { xy[rank] = [width / 2 + (k - (step.hubs.length - 1) / 2) * (card.w + 22), height / 2]; });
  return around([...Array(step.world_size).keys()].filter((r) => !step.hubs.includes(r)), width, height, card, xy);
}

function tree(step, width, height, card) {
  const n = step.world_size, depth = Math.floor(Math.log2(n));
  return Array.from({ length: n }, (_, rank) => {
    const level = Math.floor(Math.log2(rank + 1)), k = rank + 1 - 2 ** level;
    const y = depth ? card.h / 2 + 14 + (level / depth) * (height - card.h - 28) : height / 2;
    return [(width * (k + 0.5)) / 2 ** level, y];
  });
}

function row(step, width, height, card) {
  const n = step.world_size, each = perRow(n, width), lines = Math.ceil(n / each);
  return Array.from({ length: n }, (_, rank) => {
    const line = Math.floor(rank / each), k = rank % each, column = line % 2 ? each - 1 - k : k;
    return [(width * (column + 0.5)) / each, (height * (line + 0.5)) / lines];
  });
}

/** Return the point of a message that is a fraction `part` under way; opposite directions use separate lanes. */
function pointOf(step, layout, source, target, part) {
  const [x0, y0] = layout.xy[source], [x1, y1] = layout.xy[target];
  const dx = x1 - x0, dy = y1 - y0, length = Math.hypot(dx, dy) || 1;
  let bend = step.shape === "ring" ? 0 : 9;
  let nx = -dy / length, ny = dx / length;
  if (step.shape === "ring" && step.world_size > 2) {
    const mx = (x0 + x1) / 2 - layout.cx, my = (y0 + y1) / 2 - layout.cy, out = Math.hypot(mx, my);
    if (out > 20) { nx = mx / out; ny = my / out; bend = length * 0.16; }
  } else if (step.shape === "ring") bend = 24;
  const edge = Math.min(0.3, (0.42 * layout.card.w) / length);
  part = edge + (1 - 2 * edge) * part;
  const lift = 4 * part * (1 - part) * bend;
  return [x0 + dx * part + nx * lift, y0 + dy * part + ny * lift];
}

function edgesOf(step) {
  const seen = new Set();
  for (const m of step.messages) if (!isControl(m) || step.messages.length < 50) seen.add(m.rank * 4096 + m.peer);
  return seen.size > 260 ? [] : [...seen].map((key) => [Math.floor(key / 4096), key % 4096]);
}

function roundRect(ctx, x, y, w, h, r) {
  ctx.beginPath();
  ctx.roundRect(x, y, Math.max(0, w), h, Math.min(r, w / 2, h / 2));
}

function drawEdges(ctx, step, layout, look, edges) {
  ctx.strokeStyle = look.line;
  ctx.lineWidth = 1.5;
  for (const [a, b] of edges) {
    ctx.beginPath();
    for (let k = 0; k <= 8; k++) ctx[k ? "lineTo" : "moveTo"](...pointOf(step, layout, a, b, k / 8));
    ctx.stroke();
  }
}

/** Draw one rank: its name, what it does, and its memory. */
function drawRank(ctx, step, layout, look, rank, doing, t, isChosen) {
  const { w, h } = layout.card, [cx, cy] = layout.xy[rank], x = cx - w / 2, y = cy - h / 2;
  const colour = doing ? look.kind(doing.kind) : null, small = step.world_size > 16, tight = w < 76;
  ctx.fillStyle = look.card;
  ctx.strokeStyle = isChosen ? look.ink : colour ?? look.line;
  ctx.lineWidth = isChosen ? 3 : colour ? 2.5 : 1.2;
  roundRect(ctx, x, y, w, h, small ? 6 : 9);
  ctx.fill();
  ctx.stroke();
  ctx.fillStyle = look.ink;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  ctx.font = `${small ? "600 10px" : "600 12px"} ${look.font}`;
  ctx.fillText(small || step.world_size > 8 ? `${rank}` : `rank ${rank}`, cx, y + (small ? 9 : 13));
  if (!small) {
    const word = !doing ? "waits" : step.world_size > 8 || tight ? short(doing.kind) : activity(doing);
    ctx.font = `11px ${look.font}`;
    ctx.fillStyle = doing ? look.ink : look.faint;
    ctx.fillText(word, cx, y + (step.world_size > 8 ? 25 : 30), w - 8);
  }
  drawMemory(ctx, step, look, rank, t, x + (small ? 3 : 7), y + h - (small ? 9 : 17), w - (small ? 6 : 14), small ? 6 : 10);
}

const short = (kind) => LETTERS[kind] ?? (kind.startsWith("backward") ? "B" : "⇄");
const activity = (e) => (e.lane === "communication" ? "exchanges" : e.kind.startsWith("backward") && chunkOf(e) ? `backward ${chunkOf(e)}` : e.kind === "forward" && chunkOf(e) ? `forward ${chunkOf(e)}` : plain(e.kind));

function drawMemory(ctx, step, look, rank, t, x, y, w, h) {
  const held = memoryAt(step, rank, t);
  if (!held.length) return;
  ctx.fillStyle = look.track;
  roundRect(ctx, x, y, w, h, 3);
  ctx.fill();
  ctx.save();
  roundRect(ctx, x, y, w, h, 3);
  ctx.clip();
  let at = x;
  held.forEach((bytes, k) => {
    const width = (w * bytes) / step.mostMemory;
    ctx.fillStyle = look.memory[step.memory_kinds[k]];
    ctx.fillRect(at, y, width, h);
    at += width;
  });
  ctx.restore();
}

/** Draw a message: a packet whose area grows with its bytes; return its centre for the pointer. */
function drawMessage(ctx, step, layout, look, e, t, isChosen, isStill) {
  const part = isStill ? 0.5 : clamp((t - e.start) / Math.max(e.end - e.start, 1e-9));
  const eased = part < 0.5 ? 2 * part * part : 1 - (2 - 2 * part) ** 2 / 2;
  const [x, y] = pointOf(step, layout, e.rank, e.peer, eased), chunk = chunkOf(e);
  const many = step.world_size > 16, r = isControl(e) ? 3.5 : (many ? 4 : 8) + (many ? 3 : 6) * Math.sqrt(e.bytes / step.mostBytes);
  const colour = isControl(e) ? look.faint : chunk === "" ? look.cargo(e.item) : CHUNKS[chunk % CHUNKS.length];
  ctx.strokeStyle = colour;
  ctx.lineWidth = many ? 1.5 : 3;
  ctx.globalAlpha = 0.45;
  ctx.beginPath();
  for (let k = 0; k <= 6; k++) ctx[k ? "lineTo" : "moveTo"](...pointOf(step, layout, e.rank, e.peer, Math.max(0, eased - 0.3) + (Math.min(eased, 0.3) * k) / 6));
  ctx.stroke();
  ctx.globalAlpha = 1;
  ctx.fillStyle = colour;
  if (e.item.startsWith("gradients of") || /parameters/.test(e.item)) roundRect(ctx, x - r, y - r, 2 * r, 2 * r, 3);
  else { ctx.beginPath(); ctx.arc(x, y, r, 0, 7); }
  ctx.fill();
  ctx.lineWidth = isChosen ? 3 : 1.5;
  ctx.strokeStyle = isChosen ? look.ink : look.card;
  ctx.stroke();
  if (chunk !== "" && r >= 8) {
    ctx.fillStyle = "#fff";
    ctx.font = `700 11px ${look.font}`;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.fillText(chunk, x, y + 0.5);
  }
  return { x, y, r: Math.max(r, 9), event: e };
}
