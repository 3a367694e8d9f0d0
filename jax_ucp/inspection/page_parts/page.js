"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { arrays, folded, measures } = data;
  /** Texts, of which each was written as how much it begins with of the one before, and the rest. */
  const texts = (pairs) => {
    let last = "";
    return pairs.map(([begin, rest]) => (last = last.slice(0, begin) + rest));
  };
  arrays.label = texts(arrays.label);
  data.files = texts(data.files);
  for (const row of folded) row.name ??= arrays.label[row.members[0]];
  const MANY = 100;

  /** An element; children are elements or texts, and texts stay texts. */
  const el = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== false && value !== undefined) made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  };
  const bytes = (n) => {
    const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    const power = n < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(n) / 10));
    return power ? `${(n / 2 ** (10 * power)).toFixed(1)} ${units[power]}` : `${n} bytes`;
  };
  const number = (x) => (x === null || x === undefined ? "" : Math.abs(x) >= 1e5 || (x && Math.abs(x) < 1e-3) ? x.toExponential(3) : String(x));
  const several = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
  const shapeOf = (i) => data.shapes[arrays.shape[i]];
  const dtypeOf = (i) => data.dtypes[arrays.dtype[i]];
  const tokens = (name) => name.match(/(?:\{[^}]*\}|[^./])+/g) ?? [name];
  const lazily = (details, fill) =>
    details.addEventListener("toggle", () => details.open && fill(details), { once: true });

  const table = (caption, heads, rows) =>
    el("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": caption },
      el("table", {},
        el("caption", {}, caption),
        el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
        el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, cell ?? "")))))));

  // What is known of one array, and where it is stored.
  const statisticsOf = (i) => measures.filter(([key]) => arrays[key] && arrays[key][i] !== null)
    .map(([key, title]) => [title, number(arrays[key][i])]);
  const flagsOf = (i) => (arrays.flags?.[i] ? el("span", { class: "flag" }, ` ${arrays.flags[i]}`) : "");

  const picture = (i) => {
    const pieces = data.pieces[i] ?? [];
    const shape = shapeOf(i);
    if (!shape.length || shape.some((n) => n === 0)) return "";
    const grid = [arrays.chunk && data.shapes[arrays.chunk[i]], arrays.device && data.shapes[arrays.device[i]]];
    const cut = d3.range(shape.length).filter((axis) =>
      pieces.some((piece) => piece[3][axis] > 0 || piece[4][axis] < shape[axis]) || grid.some((step) => step && step[axis] < shape[axis]));
    const axes = [...new Set([...cut, ...d3.range(shape.length)])].slice(0, 2).sort((a, b) => a - b);
    const [down, across] = axes.length > 1 ? axes : [null, axes[0]];
    const span = (piece, axis) => (axis === null ? [0, 1] : [piece[3][axis], piece[4][axis]]);
    const boxes = pieces.map((piece) => {
      const [y1, y2] = span(piece, down);
      const [x1, x2] = span(piece, across);
      return { x1, x2, y1, y2, file: data.files[piece[0]], item: piece[1], from: piece[2] };
    });
    const high = down === null ? 1 : shape[down];
    const lines = (step, axis, mark, options) => !step || axis === null || step[axis] >= shape[axis] || shape[axis] / step[axis] > 256 ? []
      : [mark(d3.range(step[axis], shape[axis], step[axis]), options)];
    const files = [...new Set(boxes.map((box) => box.file))];
    const chart = plot({
      width: Math.min(900, wide()), height: down === null ? 120 : 360, marginLeft: 60, ariaLabel: `Where the parts of ${arrays.label[i]} are stored`,
      ariaDescription: "The table below has the same.",
      x: { domain: [0, shape[across]], label: `axis ${across}`, nice: false },
      y: { domain: [high, 0], label: down === null ? null : `axis ${down}`, ticks: down === null ? [] : undefined, nice: false },
      color: { legend: files.length > 1 && files.length <= 24, domain: files, scheme: files.length > 10 ? "turbo" : "observable10" },
      marks: [
        Plot.rect(boxes, { x1: "x1", x2: "x2", y1: "y1", y2: "y2", fill: "file", z: null, fillOpacity: 0.5, stroke: "currentColor", strokeWidth: 0.4,
          channels: { file: "file", item: "item", from: "from" }, tip: true }),
        ...lines(grid[0], across, Plot.ruleX, { stroke: "currentColor", strokeOpacity: 0.45, strokeDasharray: "2,3" }),
        ...lines(grid[0], down, Plot.ruleY, { stroke: "currentColor", strokeOpacity: 0.45, strokeDasharray: "2,3" }),
        ...lines(grid[1], across, Plot.ruleX, { stroke: "var(--bad)", strokeWidth: 1.5 }),
        ...lines(grid[1], down, Plot.ruleY, { stroke: "var(--bad)", strokeWidth: 1.5 }),
        Plot.frame(),
      ],
    });
    const said = [`${several(pieces.length, "piece")} in ${several(files.length, "file")}`];
    if (shape.length > 2) said.push(`axes ${axes.join(" and ")} of ${shape.length}`);
    if (grid[0]) said.push(`dotted: chunks of ${JSON.stringify(grid[0])}`);
    if (grid[1]) said.push(`red: what devices of the mesh hold, ${JSON.stringify(grid[1])} each`);
    return el("figure", {}, el("figcaption", { class: "quiet" }, said.join("; ")), chart);
  };

  const pieceTable = (i) => {
    const pieces = data.pieces[i];
    const more = data.pieces_left_out[i];
    if (!pieces) return el("p", { class: "quiet" }, "Where it is stored is left out of this page; jax-ucp inspect --leaf says it.");
    const rows = pieces.map((piece) => [boxText(piece), data.files[piece[0]], piece[1], piece[2]]);
    return el("div", {}, table(`Pieces of ${arrays.label[i]}${more ? `, the first ${pieces.length} of ${pieces.length + more}` : ""}`,
      ["block", "file", "item", "block there"], rows));
  };
  const boxText = (piece) => `[${piece[3].map((start, axis) => `${start}:${piece[4][axis]}`).join(", ")}]`;

  const arrayPanel = (i) => {
    const facts = [["shape", JSON.stringify(shapeOf(i))], ["dtype", dtypeOf(i)], ["bytes", bytes(arrays.bytes[i])], ...statisticsOf(i)];
    if (arrays.spec?.[i]) facts.push(["spec on the mesh", arrays.spec[i]]);
    return el("div", { class: "array" },
      el("p", { class: "name" }, arrays.label[i], flagsOf(i)),
      el("dl", {}, ...facts.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])),
      picture(i), pieceTable(i));
  };

  const memberTable = (members) => {
    const shown = members.slice(0, MANY);
    const kinds = measures.filter(([key]) => arrays[key] && shown.some((i) => arrays[key][i] !== null));
    const rows = shown.map((i) => [el("span", { class: "name" }, arrays.label[i], flagsOf(i)), ...kinds.map(([key]) => number(arrays[key][i]))]);
    return table(`${arrays.label[members[0]]} and ${members.length - 1} more${members.length > MANY ? `, the first ${MANY}` : ""}`, ["array", ...kinds.map(([, title]) => title)], rows);
  };

  /** A row of the tree: one array, or several that differ in numbers of their names alone. */
  const rowDetails = (name, members) => {
    const flagged = members.filter((i) => arrays.flags?.[i]).length;
    const [first] = members;
    const details = el("details", { class: "row" }, el("summary", {},
      el("span", { class: "name" }, name), ` ${JSON.stringify(shapeOf(first))} ${dtypeOf(first)}`,
      members.length > 1 ? ` ×${members.length}` : "", el("span", { class: "quiet" }, ` ${bytes(d3.sum(members, (i) => arrays.bytes[i]))}`),
      flagged ? el("span", { class: "flag" }, ` ${members.length > 1 ? `${flagged} flagged` : arrays.flags[first]}`) : ""));
    lazily(details, () => {
      if (members.length === 1) return details.append(arrayPanel(first));
      const holder = el("div", {}, arrayPanel(first));
      const choice = el("select", { "aria-label": `Which array of ${name}`, onchange: () => holder.replaceChildren(arrayPanel(Number(choice.value))) },
        ...members.map((i) => el("option", { value: i }, arrays.label[i])));
      details.append(memberTable(members), el("p", { class: "controls" }, choice), holder);
    });
    return details;
  };

  // The tree of folded names.
  const grow = (rows, parts) => {
    const root = { name: "", children: new Map(), rows: [] };
    for (const row of rows) {
      let node = root;
      const path = parts(row);
      for (const part of path.slice(0, -1)) {
        if (!node.children.has(part)) node.children.set(part, { name: part, children: new Map(), rows: [] });
        node = node.children.get(part);
      }
      node.rows.push({ ...row, name: path.at(-1) });
    }
    return root;
  };
  const below = (node) => [...node.rows, ...[...node.children.values()].flatMap(below)];
  const branch = (node, open) => {
    let title = node.name;
    while (node.children.size === 1 && !node.rows.length) {
      [node] = node.children.values();
      title += `.${node.name}`;
    }
    if (!node.children.size && node.rows.length === 1) return rowDetails(`${title}.${node.rows[0].name}`, node.rows[0].members);
    const members = below(node).flatMap((row) => row.members);
    const flagged = members.filter((i) => arrays.flags?.[i]).length;
    const details = el("details", {}, el("summary", {}, el("span", { class: "name" }, title),
      el("span", { class: "quiet" }, ` ${several(members.length, "array")}, ${bytes(d3.sum(members, (i) => arrays.bytes[i]))}`),
      flagged ? el("span", { class: "flag" }, ` ${flagged} flagged`) : ""));
    lazily(details, () => details.append(...inside(node)));
    if (open) details.open = true;
    return details;
  };
  const inside = (node, open = false) => {
    const rows = node.rows.map((row) => rowDetails(row.name, row.members));
    const branches = [...node.children.values()].map((child) => branch(child, open));
    return atFirst([...rows, ...branches]);
  };
  /** Some of many elements, and a button for more of them. */
  const atFirst = (made) => {
    if (made.length <= MANY * 2) return made;
    const more = el("button", { type: "button", onclick: () => more.replaceWith(...atFirst(made.slice(MANY))) }, `${made.length - MANY} more`);
    return [...made.slice(0, MANY), more];
  };

  const showTree = () => {
    const place = document.getElementById("tree");
    const root = grow(folded, (row) => tokens(row.name));
    const whole = inside(root, root.children.size <= 4);
    place.replaceChildren(...whole);
    const status = document.getElementById("found");
    document.getElementById("search").addEventListener("input", (event) => {
      const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
      if (!words.length) {
        status.textContent = "";
        return place.replaceChildren(...whole);
      }
      const hits = d3.range(arrays.label.length).filter((i) => words.every((word) => arrays.label[i].toLowerCase().includes(word)));
      hits.sort((a, b) => inOrder(arrays.label[a], arrays.label[b]));
      status.textContent = `${hits.length} of ${arrays.label.length} arrays${hits.length > MANY ? `; the first ${MANY} are shown` : ""}`;
      place.replaceChildren(...hits.slice(0, MANY).map((i) => rowDetails(arrays.label[i], [i])));
    });
  };

  // Bytes by module, dtype or state.
  const isNumber = (name) => /^[0-9]+$/.test(name);
  const inOrder = new Intl.Collator("en", { numeric: true }).compare;
  const groupings = {
    "kind of module": (i) => { const all = tokens(arrays.label[i]); const kinds = all.filter((part) => !isNumber(part)); return kinds.length ? kinds : all; },
    module: (i) => tokens(arrays.label[i]),
    dtype: (i) => [dtypeOf(i), ...tokens(arrays.label[i])],
    state: (i) => tokens(arrays.label[i]).slice(0, 1),
    "module without the state": (i) => tokens(arrays.label[i]).slice(1),
  };
  const showMap = () => {
    const place = document.getElementById("map");
    const trail = document.getElementById("trail");
    const choice = document.getElementById("grouping");
    choice.append(...Object.keys(groupings).filter((name) => data.has_states || !name.includes("state")).map((name) => el("option", {}, name)));
    let all, everything;
    const draw = (path) => {
      let level = all.filter((each) => path.every((part, at) => each.path[at] === part));
      const sums = d3.rollups(level, (v) => ({ bytes: d3.sum(v, (each) => each.bytes), deeper: v.some((each) => each.path.length > path.length + 1), count: v.length, inside: v }),
        (each) => each.path[path.length] ?? each.path.at(-1)).sort((a, b) => b[1].bytes - a[1].bytes);
      const numbered = sums.every(([name]) => isNumber(name));
      if (numbered) sums.sort((a, b) => inOrder(a[0], b[0]));
      const shown = sums.slice(0, MANY * 2);
      const rest = d3.sum(sums.slice(MANY * 2), ([, sum]) => sum.bytes);
      if (rest) shown.push([`${sums.length - shown.length} others`, { bytes: rest, deeper: false, count: sums.length - shown.length }]);
      const { width, height } = place.getBoundingClientRect();
      const layout = d3.treemap().tile(numbered ? d3.treemapBinary : d3.treemapSquarify);
      const root = layout.size([width || 640, height || 350]).paddingInner(2)(
        d3.hierarchy({ children: shown.map(([name, sum]) => ({ name, ...sum, children: numbered ? undefined : parts(name, sum, path.length + 1, shown.length) })) })
          .sum((node) => (node.children ? 0 : node.bytes ?? 0)));
      const total = d3.sum(level, (each) => each.bytes);
      const colour = d3.scaleOrdinal(numbered ? [d3.schemeObservable10[0]] : d3.schemeObservable10);
      place.replaceChildren(...(root.children ? root.leaves() : []).map((leaf) => tile(leaf, colour(numbered ? "" : leaf.data.of ?? leaf.data.name), total, path)));
      trail.replaceChildren(...["all", ...path].map((name, at) =>
        el("button", { type: "button", "aria-current": at === path.length ? "true" : false, onclick: () => { draw(path.slice(0, at)); trail.lastChild.focus(); } }, name)),
        el("span", { class: "quiet" }, ` ${bytes(total)}${path.length && total < everything ? `, ${(100 * total / everything).toFixed(1)} % of all` : ""}`));
    };
    /** What a module is made of, as tiles of one colour; none where there are many modules, or one part. */
    const parts = (name, { deeper, inside }, depth, modules) => {
      if (!deeper || modules > 24) return undefined;
      const sums = d3.rollups(inside, (v) => ({ bytes: d3.sum(v, (each) => each.bytes), count: v.length }), (each) => each.path[depth] ?? each.path.at(-1));
      if (sums.length < 2 || sums.length > 16 || sums.some(([part]) => isNumber(part))) return undefined;
      return sums.sort((a, b) => b[1].bytes - a[1].bytes).map(([part, sum]) => ({ name: `${name}.${part}`, of: name, deeper, ...sum }));
    };
    /** As many words as a tile has room for: its name, and below it the bytes; or none. */
    const words = (leaf, name, below) => {
      const [wide, high] = [leaf.x1 - leaf.x0 - 10, leaf.y1 - leaf.y0 - 4];
      const fits = (text, lines) => text.length * 7.2 <= wide && lines * 17 <= high;
      if (!fits(name, 1)) return [];
      if (!fits(name, 2)) return [el("span", { class: "title" }, name)];
      const line = [below.join(", "), below[0]].find((text) => fits(text, 2));
      return [el("span", { class: "title" }, name), ...(line ? [el("span", {}, line)] : [])];
    };
    const tile = (leaf, back, total, path) => {
      const { name, of, bytes: size, deeper, count } = leaf.data;
      const share = total ? (100 * size / total).toFixed(1) : "0";
      const text = `${name}: ${bytes(size)}, ${share} %, ${several(count, "array")}`;
      const made = el("button", { type: "button", class: "tile", title: text, "aria-label": text, disabled: deeper ? false : "",
        onclick: () => { draw(down([...path, of ?? name], 1)); place.querySelector("button:not(:disabled)")?.focus(); } }, ...words(leaf, name, [bytes(size), `${share} %`]));
      Object.assign(made.style, { left: `${leaf.x0}px`, top: `${leaf.y0}px`, width: `${leaf.x1 - leaf.x0}px`, height: `${leaf.y1 - leaf.y0}px`,
        background: `color-mix(in srgb, ${back} 38%, var(--back))` });
      return made;
    };
    const start = () => {
      all = d3.range(arrays.label.length).map((i) => ({ path: groupings[choice.value](i), bytes: arrays.bytes[i] }));
      everything = d3.sum(all, (each) => each.bytes);
      draw(down([], 0.9));
    };
    /** A path, further down while one child has that share of the bytes. */
    const down = (path, share) => {
      for (;;) {
        const level = all.filter((each) => path.every((part, at) => each.path[at] === part));
        const total = d3.sum(level, (each) => each.bytes);
        const [name, most] = d3.greatest(d3.rollups(level, (v) => d3.sum(v, (each) => each.bytes), (each) => each.path[path.length]), (each) => each[1]) ?? [];
        if (name === undefined || most < share * total || !level.some((each) => each.path[path.length] === name && each.path.length > path.length + 1)) return path;
        path = [...path, name];
      }
    };
    choice.addEventListener("change", start);
    start();
  };

  const wide = () => document.querySelector("main").clientWidth - 16;
  const FONT = { fontSize: "13px" };
  /** A picture whose parts with names are pictures too: Plot names groups that have no role. */
  const plot = (options) => {
    const drawn = Plot.plot({ style: FONT, ...options });
    drawn.querySelectorAll("[aria-label]:not([role])").forEach((part) => part.setAttribute("role", "img"));
    return drawn;
  };
  /** Names without what all of them begin and end with, as far as that is whole parts. */
  const short = (names) => {
    const parts = names.map((name) => name.split(/(?<=[./])/));
    const same = (at) => names.length > 1 && parts.every((each) => each.length > 1 && each.at(at) === parts[0].at(at));
    while (same(0)) parts.forEach((each) => each.shift());
    while (same(-1)) parts.forEach((each) => each.pop());
    return new Map(names.map((name, i) => [name, parts[i].join("").replace(/[./]$/, "")]));
  };
  const whole = (values) => d3.ticks(d3.min(values), d3.max(values), 10).filter(Number.isInteger);

  // Numbers by depth: the first number in a name is the depth, the others do not tell arrays apart.
  const depthOf = (label) => {
    const found = /(?<![A-Za-z0-9])(0|[1-9][0-9]{0,8})(?![A-Za-z0-9])/.exec(label);
    if (!found) return null;
    const rest = label.slice(found.index + found[0].length).replace(/(?<![A-Za-z0-9])[0-9]+(?![A-Za-z0-9])/g, "*");
    const second = /(?<![A-Za-z0-9])(0|[1-9][0-9]{0,8})(?![A-Za-z0-9])/.exec(label.slice(found.index + found[0].length));
    return { depth: Number(found[0]), part: second && Number(second[0]), series: `${label.slice(0, found.index)}#${rest}` };
  };
  /** Numbers between the least and the greatest, as many as a legend has room for. */
  const steps = (values, log) => {
    const [least, most] = d3.extent(values);
    const count = wide() < 420 ? 5 : 9;
    return d3.range(1, count + 1).map((at) => at / (count + 1)).map((share) => (log ? least * (most / least) ** share : least + (most - least) * share));
  };
  /** A cell for each layer and expert, of the kind of array that is chosen; without experts for each layer and module. */
  const heat = (placed, names, measured, named) => {
    const [experts, rowsAtMost] = [names.filter((name) => placed.some((point) => point.series === name && point.part !== null)), 32];
    const shorter = short(experts.length ? experts : names.slice(0, rowsAtMost));
    const cellsOf = (kind) => placed.filter((point) => (kind ? point.series === kind : shorter.has(point.series)))
      .map((point) => ({ layer: point.depth, row: kind ? point.part : shorter.get(point.series), value: point.value, label: point.label, flags: arrays.flags?.[point.at] }));
    const rows = (cells) => [...new Set(cells.map((cell) => cell.row))].sort((a, b) => inOrder(String(a), String(b)));
    const holder = el("div", {});
    const draw = (kind) => {
      const cells = cellsOf(kind);
      const [layers, across] = [[...new Set(cells.map((cell) => cell.layer))].sort((a, b) => a - b), rows(cells)];
      if (layers.length < 2 || across.length < 2 || cells.length > 40000) return holder.replaceChildren();
      const log = cells.every((cell) => cell.value >= 0) && cells.some((cell) => cell.value > 0);
      const drawn = log ? cells.filter((cell) => cell.value > 0) : cells;
      const wrong = cells.filter((cell) => cell.flags || (log && cell.value === 0));
      const thin = (values, most) => values.filter((_, at) => at % Math.ceil(values.length / most) === 0);
      const margin = 20 + 7.5 * Math.min(34, d3.max(across, (row) => String(row).length));
      const ticks = kind ? Math.min(across.length, 32) : across.length;
      holder.replaceChildren(el("figure", {}, el("figcaption", { class: "quiet" },
        `${measured}, a cell for each layer and ${kind ? "expert" : "module"}${log ? "; logarithmic colours" : ""}${wrong.length ? `; red: ${several(wrong.length, "array")} to check` : ""}`),
        plot({
          width: wide(), height: 50 + Math.max((kind ? 14 : 22) * ticks, Math.min(520, 10 * across.length)), marginLeft: margin, marginBottom: 40,
          ariaLabel: `${named}, ${measured} by layer and ${kind ? "expert" : "module"}`, ariaDescription: "Each cell is an array; the arrays above have the same values.",
          x: { domain: layers, label: "layer", ticks: thin(layers, 30), tickFormat: String, padding: 0 }, y: { domain: across, label: null, ticks: thin(across, 32), tickFormat: (row) => String(row).slice(-34), padding: 0 },
          // steps, since the legend of a continuous scale is an image, which the page's policy forbids
          color: { type: "threshold", domain: steps(drawn.map((cell) => cell.value), log), scheme: "viridis", legend: true, label: measured, tickFormat: (x) => number(Number(x.toPrecision(3))), width: Math.min(420, wide()), style: FONT },
          marks: [Plot.cell(drawn, { x: "layer", y: "row", fill: "value", inset: 0.5, channels: { array: "label" }, tip: true }),
            Plot.cell(wrong, { x: "layer", y: "row", fill: "var(--bad)", inset: 0.5, channels: { array: "label", value: "value", check: "flags" }, tip: true })],
        })));
    };
    if (!experts.length) {
      draw(null);
      return holder;
    }
    const choice = el("select", { "aria-label": `${named}: which kind of array`, onchange: () => draw(choice.value) }, ...experts.map((name) => el("option", { value: name }, shorter.get(name))));
    draw(experts[0]);
    return el("div", {}, el("p", { class: "controls" }, choice), holder);
  };
  const byDepth = (place, points, kinds, named) => {
    const choices = kinds.map(([key, title]) => el("option", { value: key }, title));
    const measure = el("select", { "aria-label": `${named}: what is drawn` }, ...choices);
    const states = [...new Set(points.map((point) => point.label.split("/")[0]))];
    const state = el("select", { "aria-label": `${named}: of which arrays` }, ...(data.has_states ? states : ["all"]).map((name) => el("option", {}, name)));
    if (data.has_states && states.includes("param")) state.value = "param";
    const holder = el("div", {});
    const draw = () => {
      const key = measure.value;
      const some = points.filter((point) => (!data.has_states || point.label.split("/")[0] === state.value) && point[key] !== null && point[key] !== undefined);
      const placed = some.map((point) => ({ ...depthOf(point.label), value: point[key], label: point.label, at: point.at, weight: point.weight ?? 1 })).filter((point) => point.series);
      const series = d3.flatRollup(placed, (v) => d3.mean(v, (point) => point.value), (point) => point.series, (point) => point.depth)
        .map(([name, depth, value]) => ({ name, depth, value }));
      const sizes = d3.rollups(placed, (v) => d3.sum(v, (point) => point.weight), (point) => point.series).sort((a, b) => b[1] - a[1]);
      const names = sizes.slice(0, 10).map(([name]) => name);
      const shorter = short(names);
      const drawn = series.filter((point) => names.includes(point.name)).map((point) => ({ ...point, name: shorter.get(point.name) }));
      const alone = some.filter((point) => !depthOf(point.label)).map((point) => ({ label: point.label, value: point[key] }));
      const log = drawn.length > 0 && drawn.every((point) => point.value > 0);
      holder.replaceChildren(heat(placed, sizes.map(([name]) => name), measure.selectedOptions[0].text, named),
        new Set(drawn.map((point) => point.depth)).size > 1 ? el("figure", {}, el("figcaption", { class: "quiet" },
          `${measure.selectedOptions[0].text} by depth; the mean, if several arrays have the same depth${sizes.length > names.length ? `; the ${names.length} largest of ${sizes.length} kinds` : ""}${log ? "; logarithmic axis" : ""}`),
          plot({
            width: wide(), height: 340, marginLeft: 70, marginRight: 20, marginBottom: 40, ariaLabel: `${named}, ${measure.selectedOptions[0].text} by depth`, ariaDescription: "The table below has the same values.",
            x: { label: "depth", tickFormat: "d", ticks: whole(drawn.map((point) => point.depth)) }, y: { type: log ? "log" : "linear", grid: true, ticks: 6, tickFormat: number, label: measure.selectedOptions[0].text },
            color: { legend: true, domain: names.map((name) => shorter.get(name)), scheme: "observable10", style: FONT },
            marks: [Plot.lineY(drawn, { x: "depth", y: "value", stroke: "name", z: "name", sort: "depth" }),
              Plot.dot(drawn, { x: "depth", y: "value", fill: "name", z: null, r: 2.5, tip: true })],
          })) : el("p", { class: "quiet" }, drawn.length ? "All of them are in one layer." : "No name has a number, which could be a depth."),
        el("details", {}, el("summary", {}, "As a table"),
          table(`${measure.selectedOptions[0].text}${series.length + alone.length > 500 ? ", the first 500" : ""}`, ["arrays", "depth", measure.selectedOptions[0].text],
            [...series.map((point) => [el("span", { class: "name" }, point.name), String(point.depth), number(Number(point.value.toPrecision(4)))]),
              ...alone.map((point) => [el("span", { class: "name" }, point.label), "", number(point.value)])].slice(0, 500))));
    };
    measure.addEventListener("change", draw);
    state.addEventListener("change", draw);
    place.replaceChildren(el("p", { class: "controls" }, measure, state), holder);
    if (choices.length) draw();
  };

  const showDepth = () => {
    const place = document.getElementById("depth");
    if (!place) return;
    const kinds = measures.filter(([key]) => arrays[key]?.some((value) => value !== null));
    const points = arrays.label.map((label, i) => ({ label, at: i, weight: arrays.bytes[i], ...Object.fromEntries(kinds.map(([key]) => [key, arrays[key][i]])) }));
    byDepth(place, points, kinds, "Statistics");
  };
  const showDifference = () => {
    const place = document.getElementById("changes");
    if (place) byDepth(place, data.changes, [["share", "share of elements changed"], ["largest", "largest difference"], ["relative", "largest relative difference"], ["turned", "1 - cosine"]], "Differences");
  };

  showTree();
  showMap();
  showDepth();
  showDifference();
  document.documentElement.dataset.ready = "yes";
})();
