/* Draws the ranks, their memory and the travelling messages on a canvas. */

const CHUNKS = ["#2a86d1", "#e08a3c", "#11997a", "#b866a6", "#c49a0c", "#5f6fd6", "#3aa5b5", "#a35a3a"];
const HEIGHT = { ring: 272, tree: 272, star: 272, row: 150, grid: 272 };
const HEAD = 20, MARGIN = 66;

/** Return the centres of all ranks and the size of a card, for a canvas of this width. */
function places(step, width) {
  const n = step.world_size;
  const big = n <= 8, height = (n <= 2 && step.shape !== "row" ? 170 : HEIGHT[step.shape]) + (n > 16 && step.shape !== "row" ? (n > 32 ? 270 : 120) : 0) + (step.shape === "row" ? Math.max(0, Math.ceil(n / perRow(n, width)) - 1) * 90 : 0);
  const room = { tree: 2 ** Math.floor(Math.log2(n)), row: perRow(n, width), grid: sides(step).columns + 1 }[step.shape];
  const strips = Object.keys(step.cellsOf[0]).length > 1 ? 13 : 0;
  const across = step.shape === "ring" || step.shape === "star" ? Math.max(3, (n + 3) / 2) : Math.max(room, 4);
  const card = n > 32 ? { w: 23, h: 22 } : n > 16 ? { w: 30, h: 26 } : big ? { w: Math.min(n > 4 ? 104 : 176, Math.max(62, (width / across) * 0.84)), h: (n > 4 ? 52 : 64) + strips } : { w: 54, h: 44 };
  const xy = { ring: circle, tree, star, row, grid }[step.shape](step, width, height, card);
  return { xy, card, height, cx: width / 2, cy: height / 2 };
}

const perRow = (n, width) => Math.min(n, Math.max(2, Math.floor(width / (n > 16 ? 44 : n > 8 ? 78 : 92))));

function around(ranks, width, height, card, xy) {
  const rx = Math.min(width / 2 - card.w / 2 - 14, (height / 2 - card.h / 2) * (ranks.length > 16 ? 1.35 : 2.1)), ry = height / 2 - card.h / 2 - 12;
  ranks.forEach((rank, k) => {
    const a = (ranks.length === 2 ? Math.PI : -Math.PI / 2) + (2 * Math.PI * k) / ranks.length;
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

/** Return the rows and columns of a mesh: the innermost axis along one of them, all other axes along the other. */
function sides(step) {
  const axes = step.axes.filter((axis) => axis.size > 1), inner = axes.at(-1) ?? { size: 1, stride: 1 };
  const outer = step.world_size / inner.size, isAcross = inner.size > outer;
  return { inner, others: axes.slice(0, -1), isAcross, columns: isAcross ? inner.size : outer, rows: isAcross ? outer : inner.size };
}

const indexOn = (axis, rank) => Math.floor(rank / axis.stride) % axis.size;

/** Ranks in a grid, with a gap between the groups of ranks that the outermost of several axes tells apart. */
function grid(step, width, height) {
  const { inner, others, isAcross, columns, rows } = sides(step), gaps = others.length > 1 ? others[0].size - 1 : 0;
  const across = (width - MARGIN) / (columns + 0.35 * gaps), down = (height - HEAD) / (rows + (isAcross ? 0.35 * gaps : 0));
  return Array.from({ length: step.world_size }, (_, rank) => {
    const outer = Math.floor(rank / inner.size), gap = gaps ? 0.35 * indexOn(others[0], rank) : 0;
    const [column, row] = isAcross ? [rank % inner.size, outer + gap] : [outer + gap, rank % inner.size];
    return [MARGIN + across * (column + 0.5), HEAD + down * (row + 0.5)];
  });
}

/** Write the index on each axis beside the rows and above the columns of a mesh. */
function drawIndices(ctx, step, layout, look) {
  const { inner, others, isAcross } = sides(step), { w, h } = layout.card;
  const words = (axes, rank) => axes.map((axis) => `${axis.name} ${indexOn(axis, rank)}`).join(" · ");
  ctx.fillStyle = look.faint;
  ctx.font = `11px ${look.font}`;
  ctx.textBaseline = "middle";
  layout.xy.forEach(([x, y], rank) => {
    const isTop = isAcross ? rank < inner.size : rank % inner.size === 0, isLeft = isAcross ? rank % inner.size === 0 : rank < inner.size;
    ctx.textAlign = "center";
    if (isTop) ctx.fillText(words(isAcross ? [inner] : others, rank), x, y - h / 2 - 10, w + 24);
    ctx.textAlign = "right";
    if (isLeft) ctx.fillText(words(isAcross ? others : [inner], rank), MARGIN - 6, y, MARGIN - 8);
  });
}

/** Draw the links of each group to the next rank on its axis; those of groups that now exchange are bold. */
function drawAxes(ctx, step, layout, look, spans, messages) {
  const isBusy = (axis, ...ranks) => [...spans, ...messages].some((e) => axisOf(e.kind) === axis.name && ranks.includes(e.rank));
  for (const axis of step.axes) {
    for (let rank = 0; rank < step.world_size; rank++) {
      if (indexOn(axis, rank) === axis.size - 1) continue;
      const next = rank + axis.stride, bold = isBusy(axis, rank, next);
      ctx.strokeStyle = look.axes[axis.name];
      ctx.globalAlpha = bold ? 1 : 0.45;
      ctx.lineWidth = bold ? 5 : 2;
      ctx.beginPath();
      ctx.moveTo(...pointOf(step, layout, rank, next, 0));
      ctx.lineTo(...pointOf(step, layout, rank, next, 1));
      ctx.stroke();
    }
  }
  ctx.globalAlpha = 1;
}

/** Return the point of a message that is a fraction `part` under way; opposite directions use separate lanes. */
function pointOf(step, layout, source, target, part) {
  const [x0, y0] = layout.xy[source], [x1, y1] = layout.xy[target];
  const dx = x1 - x0, dy = y1 - y0, length = Math.hypot(dx, dy) || 1;
  const isFar = step.shape === "grid" && (Math.abs(dx) > 2.2 * layout.card.w || Math.abs(dy) > 2.2 * layout.card.h);
  let bend = step.shape === "ring" ? 0 : isFar ? 0.9 * layout.card.h : step.shape === "grid" ? 0 : 9;
  let nx = -dy / length, ny = dx / length;
  if (step.shape === "ring" && step.world_size > 2) {
    const mx = (x0 + x1) / 2 - layout.cx, my = (y0 + y1) / 2 - layout.cy, out = Math.hypot(mx, my);
    if (out > 20) { nx = mx / out; ny = my / out; bend = length * 0.16; }
  } else if (step.shape === "ring") bend = 24;
  const inside = Math.min(layout.card.w / 2 / Math.abs(dx || 1), layout.card.h / 2 / Math.abs(dy || 1));
  const edge = Math.min(0.4, inside + (step.world_size > 8 ? 0 : 6 / length));
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
  if (step.shape === "grid") edges = edges.filter(([a, b]) => !step.axes.some((axis) => Math.abs(a - b) === axis.stride));
  ctx.strokeStyle = look.line;
  ctx.lineWidth = 1.5;
  for (const [a, b] of edges) {
    ctx.beginPath();
    for (let k = 0; k <= 8; k++) ctx[k ? "lineTo" : "moveTo"](...pointOf(step, layout, a, b, k / 8));
    ctx.stroke();
  }
}

/** Draw one rank: its name, what it does, and its cells; return the boxes of the cells for the pointer. */
function drawRank(ctx, step, layout, look, rank, doing, t, isChosen) {
  const { w, h } = layout.card, [cx, cy] = layout.xy[rank], x = cx - w / 2, y = cy - h / 2;
  const colour = doing ? look.kind(doing.kind) : null, small = step.world_size > 16, mid = step.world_size > 8;
  ctx.fillStyle = look.card;
  ctx.strokeStyle = isChosen ? look.ink : colour ?? look.line;
  ctx.lineWidth = isChosen ? 3 : colour ? 2.5 : 1.2;
  roundRect(ctx, x, y, w, h, small ? 6 : 9);
  ctx.fill();
  ctx.stroke();
  ctx.fillStyle = look.ink;
  ctx.textBaseline = "middle";
  ctx.textAlign = mid ? "center" : "left";
  ctx.font = `600 ${small ? 10 : 12}px ${look.font}`;
  const name = mid ? `${rank}` : `rank ${rank}`, top = y + (small ? 8 : 13), left = x + (small ? 3 : 8);
  ctx.fillText(name, mid ? cx : left, top);
  if (!small) {
    const room = mid ? w - 8 : w - 22 - ctx.measureText(name).width;
    ctx.font = `11px ${look.font}`;
    const long = doing ? activity(doing) : "waits", word = ctx.measureText(long).width <= room ? long : doing ? short(doing.kind) : "";
    ctx.fillStyle = doing ? look.ink : look.faint;
    ctx.textAlign = mid ? "center" : "right";
    ctx.fillText(word, mid ? cx : x + w - 8, mid ? y + 24 : top);
  }
  const strips = Object.entries(step.cellsOf[rank]), from = y + (small ? 14 : mid ? 31 : 24), room = y + h - from - (small ? 3 : 7);
  const thin = strips.length > 1 ? Math.min(10, room / 3) : 0;
  return strips.flatMap(([what, cells], k) => {
    const place = k ? [left, y + h - (small ? 3 : 6) - thin, w - 2 * (left - x), thin] : [left, from, w - 2 * (left - x), room - (thin && thin + 2)];
    return drawCells(ctx, step, look, what, cells, t, ...place);
  });
}

const short = (kind) => LETTERS[kind] ?? (kind === "fixed cost" ? "" : null) ?? (kind.startsWith("backward") ? "B" : "⇄");
const activity = (e) => (e.lane === "communication" ? "exchanges" : e.kind.startsWith("backward") && chunkOf(e) ? `backward ${chunkOf(e)}` : e.kind === "forward" && chunkOf(e) ? `forward ${chunkOf(e)}` : plain(e.kind));

/** Draw a row of cells, each as full as what it stands for is complete; return their boxes. */
function drawCells(ctx, step, look, what, cells, t, x, y, w, h) {
  const gap = w / cells.length > 12 ? 3 : 1, each = (w + gap) / cells.length - gap;
  return cells.map((cell, k) => {
    const left = x + k * (each + gap), level = levelAt(cell, t), height = h * level, round = Math.min(4, each / 3);
    const colour = what === "micro-batches" ? look.kind(level > 0.505 ? "backward" : "forward") : what === "parameters" ? look.memory.parameters : CHUNKS[cell.index % CHUNKS.length];
    ctx.save();
    roundRect(ctx, left, y, each, h, round);
    ctx.fillStyle = look.track;
    ctx.fill();
    ctx.clip();
    ctx.fillStyle = colour;
    ctx.globalAlpha = level > 0.999 || what === "micro-batches" ? 1 : 0.62;
    ctx.fillRect(left, y + h - height, each, height);
    ctx.globalAlpha = 1;
    if (isSentOn(cell, t)) {
      ctx.strokeStyle = look.line;
      ctx.lineWidth = 1;
      ctx.beginPath();
      for (let at = left - h; at < left + each; at += 6) { ctx.moveTo(at, y + h); ctx.lineTo(at + h, y); }
      ctx.stroke();
    }
    ctx.restore();
    ctx.strokeStyle = level > 0.999 ? colour : look.line;
    ctx.lineWidth = level > 0.999 ? 1.5 : 1;
    roundRect(ctx, left, y, each, h, round);
    ctx.stroke();
    if (each >= 22 && h >= 20) cellText(ctx, step, look, cell, level, t, left + each / 2, y + h / 2, colour);
    return { x: left, y, w: each, h, cell };
  });
}

/** Write into a cell how many ranks' gradients it sums, or the number of its micro-batch. */
function cellText(ctx, step, look, cell, level, t, x, y, colour) {
  const n = step.num_summed, count = Math.floor(level * n + 0.01);
  const sum = n === 1 ? "" : cell.parts > 1 && level < 0.999 ? "" : count >= n ? "✓" : count ? `${count}/${n}` : "";
  const text = cell.what === "micro-batches" ? `${cell.index}` : sum;
  ctx.font = `600 11px ${look.font}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  ctx.fillStyle = level > (cell.what === "micro-batches" ? 0.45 : 0.999) ? look.inkOn(colour) : look.ink;
  ctx.fillText(text, x, y + 0.5);
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
