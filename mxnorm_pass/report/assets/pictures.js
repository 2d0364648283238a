// ---- the pictures ------------------------------------------------------------------------------

const COLOURS = {
  "": { fill: "#ffffff", line: "#6b7280" },
  removed: { fill: "#fdeaea", line: "#b42318" },
  changed: { fill: "#fff4d6", line: "#8a6100" },
  new: { fill: "#e3f6e8", line: "#146c2e" },
  failed: { fill: "#ffd9d6", line: "#b42318" },
  outside: { fill: "#f1f3f5", line: "#9aa1ab" },
};
const SIGNS = { "": "", removed: "\u2212 ", changed: "~ ", new: "+ ", failed: "\u2717 " };
const OUTSIDE = new Set(["input", "row", "gain"]);
const TITLES = { norm: "RMSNorm", pick: "picks rows", cast: "MX cast", dequantise: "dequantise",
  "weight cast": "weight cast", "column cast": "MX cast along tokens", backward: "backward", reader: "read elsewhere", rewrite: "views and conversions" };
// Drawn as one box where they hang together; the op and its results stand alone.
const together = (n) => n[NODE.role] in TITLES && !/^(mxnorm\.|getitem$)/.test(n[NODE.op]);

function pictures(site) {
  const box = el("div", { class: "pictures" });
  if (!site.before) {
    box.append(el("p", { class: "none" }, "No picture of this site is known."));
    return box;
  }
  const buttons = el("div", { class: "bar", role: "group", "aria-label": "How much the pictures show" });
  const legend = el("ul", { class: "legend", "aria-label": "Colours" });
  for (const [mark, text] of site.after
    ? [["removed", "removed"], ["changed", "reads or gives something else"], ["new", "new"], ["outside", "outside the site"]]
    : [["failed", "where it failed"], ["outside", "outside"]]) {
    const c = COLOURS[mark];
    legend.append(el("li", {}, el("span", { class: "swatch", style: `background:${c.fill};border-color:${c.line}` },
      (SIGNS[mark] || "").trim()), text));
  }
  const panes = el("div", { class: site.after ? "panes" : "panes one" });
  const made = [["before", site.before], ["after", site.after]].filter(([, v]) => v).map(([name, view]) => {
    const figure = el("figure", { class: "pane " + name }, el("figcaption", {}, caption(site, name, view)));
    const canvas = el("div", { class: "canvas", tabindex: "0", role: "region", "aria-label": `Graph ${name}` }, "drawing\u2026");
    figure.append(canvas, nodeList(view));
    panes.append(figure);
    return { name, view, canvas };
  });
  const picked = el("div", { class: "picked", "aria-live": "polite" });
  const set = (grouped) => {
    for (const b of buttons.children) b.setAttribute("aria-pressed", String((b.dataset.grouped === "1") === grouped));
    for (const { view, canvas } of made) draw(view, canvas, grouped, picked);
  };
  for (const [text, grouped] of [["Grouped", true], ["Every node", false]]) {
    const button = el("button", { type: "button", "data-grouped": grouped ? "1" : "0" }, text);
    button.addEventListener("click", () => set(grouped));
    buttons.append(button);
  }
  box.append(el("div", { class: "picture-head" }, el("h3", {}, "Graph"), buttons, legend), panes, picked);
  // Every node at once where there are few.
  set(Math.max(...made.map((m) => m.view.names.length)) > 14);
  return box;
}

function caption(site, name, view) {
  const { nodes, left_out } = data.pictures[view.picture];
  const inside = nodes.filter((n) => !OUTSIDE.has(n[NODE.role]));
  const marks = inside.filter((n) => n[NODE.mark] === (name === "before" ? "removed" : "new")).length;
  const what = site.after ? `, ${marks} ${name === "before" ? "removed" : "new"}` : "";
  return `${name === "before" ? "Before" : "After"}: ${inside.length} nodes${what}${left_out ? `, ${left_out} more not shown` : ""}`;
}

// The same in words, for those who cannot see the picture.
function nodeList(view) {
  const box = el("details", { class: "nodes" }, el("summary", {}, "as a list"));
  box.addEventListener("toggle", () => {
    if (box.open && !box.querySelector("table")) box.append(nodeTable(view, view.names.map((_, i) => i)));
  });
  return box;
}

function nodeTable(view, which) {
  const picture = data.pictures[view.picture];
  const head = el("tr", {}, ...["node", "op", "value", "reads", "part", "mark", "module", "line"].map((t) => el("th", { scope: "col" }, t)));
  const body = el("tbody");
  for (const i of which) {
    const n = picture.nodes[i];
    const stack = n[NODE.stack] === null ? null : data.stacks[n[NODE.stack]];
    const line = stack && data.lines[stack[stack.length - 1]];
    const where = line ? `${line[LINE.file].split("/").pop()}:${line[LINE.line]}` : "";
    const cells = [view.names[i], n[NODE.op], n[NODE.value], n[NODE.inputs].map((j) => view.names[j]).join(", "),
      n[NODE.role], n[NODE.mark], n[NODE.module], where];
    body.append(el("tr", { class: n[NODE.mark] || null }, ...cells.map((t) => el("td", {}, t))));
  }
  return el("div", { class: "scroll" }, el("table", { class: "node-table" }, el("thead", {}, head), body));
}

const short = (op) => op.replace(/^(aten|prims|torch)\./, "").replace(/\.(default|Tensor|Scalar|Tensor_Scalar|Tensor_Tensor|self|dim|int|dtype)$/, "")
  .replace("convert_element_type", "convert");

// Boxes of a picture: { nodes, role, mark }, one a node or one a connected part; equal ones beside
// each other (q, k and v) become one.
function boxes(view, grouped) {
  const { nodes } = data.pictures[view.picture];
  const parent = nodes.map((_, i) => i);
  const find = (i) => { while (parent[i] !== i) i = parent[i] = parent[parent[i]]; return i; };
  if (grouped) {
    nodes.forEach((n, i) => {
      if (!together(n)) return;
      for (const j of n[NODE.inputs]) {
        const m = nodes[j];
        if (together(m) && m[NODE.role] === n[NODE.role]) parent[find(i)] = find(j);
      }
    });
  }
  const users = nodes.map(() => []);
  nodes.forEach((n, i) => n[NODE.inputs].forEach((j) => users[j].push(i)));
  const byRoot = new Map();
  nodes.forEach((n, i) => {
    const root = find(i);
    if (!byRoot.has(root)) byRoot.set(root, { nodes: [], role: n[NODE.role], mark: n[NODE.mark], count: 1 });
    byRoot.get(root).nodes.push(i);
  });
  // A part of which some nodes stay has changed; one that is all but gone is gone.
  for (const b of byRoot.values()) {
    const gone = b.nodes.filter((i) => nodes[i][NODE.mark] === "removed").length;
    if (b.nodes.some((i) => nodes[i][NODE.mark] !== b.mark)) b.mark = gone > b.nodes.length / 2 ? "removed" : "changed";
  }
  let list = [...byRoot.values()];
  const home = new Map();
  for (const b of list) for (const i of b.nodes) home.set(i, b);
  const ops = (b) => b.nodes.slice(0, b.nodes.length / b.count).map((i) => nodes[i][NODE.op]).join();
  // What a box reads may be merged after it was looked at: until nothing more is.
  for (let before = Infinity; grouped && list.length < before;) {
    before = list.length;
    const known = new Map();
    const id = new Map(list.map((b, i) => [b, i]));
    for (const b of list) {
      const first = nodes[b.nodes[0]];
      const reads = new Set(b.nodes.flatMap((i) => nodes[i][NODE.inputs]).map((j) => id.get(home.get(j))));
      reads.delete(id.get(b));
      // What reads nothing is told apart by who reads it.
      const readers = reads.size ? "" : [...new Set(b.nodes.flatMap((i) => users[i]).map((u) => ops(home.get(u))))].sort().join();
      const own = first[NODE.op] === "getitem" ? view.names[b.nodes[0]].replace(/_\d+$/, "") : "";
      const signature = JSON.stringify([b.role, b.mark, ops(b), [...reads].sort((x, y) => x - y), readers, own]);
      const same = known.get(signature);
      if (same && !/^mxnorm\./.test(first[NODE.op]) && b.role !== "row" && b.role !== "gain") {
        same.nodes.push(...b.nodes);
        same.count += b.count;
        for (const i of b.nodes) home.set(i, same);
        id.set(b, id.get(same));
      } else {
        known.set(signature, b);
      }
    }
    list = list.filter((b) => home.get(b.nodes[0]) === b);
  }
  return { list, home, nodes };
}

function wrap(words, width) {
  const out = [""];
  for (const word of words) {
    if (out[out.length - 1] && (out[out.length - 1] + word).length > width) out.push("");
    out[out.length - 1] += word;
  }
  return out;
}

function label(b, view, nodes, grouped) {
  const first = nodes[b.nodes[0]];
  const times = b.count > 1 ? `${b.count} \u00d7 ` : "";
  const values = [...new Set(b.nodes.map((i) => nodes[i][NODE.value]))].filter(Boolean);
  const modules = [...new Set(b.nodes.map((i) => nodes[i][NODE.module]))].filter(Boolean);
  if (b.nodes.length > 1 && together(first)) {
    const one = b.nodes.slice(0, b.nodes.length / b.count);
    const ops = one.map((i) => short(nodes[i][NODE.op]));
    const counted = [...new Set(ops)].map((op) => [op, ops.filter((o) => o === op).length])
      .map(([op, n]) => (n > 1 ? `${op}\u00a0\u00d7${n}` : op));
    const some = counted.length > 9 ? [...counted.slice(0, 8), `${counted.length - 8} more`] : counted;
    const lines = wrap(some.map((o, i) => (i < some.length - 1 ? o + ", " : o)), 38);
    const marks = one.map((i) => nodes[i][NODE.mark]);
    const partly = new Set(marks).size > 1 ? ["removed", "changed", "new"].map((m) => [marks.filter((x) => x === m).length, m])
      .filter(([n]) => n).map(([n, m]) => `, ${n} ${m}`).join("") : "";
    const node = (one.length > 1 ? `${one.length} nodes` : view.names[one[0]]) + partly;
    return [`${SIGNS[b.mark]}${times}${TITLES[b.role] || b.role} (${node})`, ...lines];
  }
  const own = view.names[b.nodes[0]];
  const name = b.count > 1 || first[NODE.op].startsWith("mxnorm.") ? short(first[NODE.op])
    : first[NODE.op] === "getitem" || first[NODE.op] === "placeholder" ? own : `${own} = ${short(first[NODE.op])}`;
  const what = OUTSIDE.has(b.role) && b.role !== "input" ? `${b.role}: ${own}` : name;
  const out = wrap((SIGNS[b.mark] + times + what).split(/(?<=[ .])/), 40);
  out.push(...wrap(values.slice(0, 4).join(", ").split(/(?<=, )/), 44));
  if (b.role === "matmul") out.push(...wrap(modules.map((m, i) => m + (i < modules.length - 1 ? ", " : "")), 44));
  return out;
}

// Graphviz reads escapes and entities in labels, and cuts nothing off.
const plain = (text) => (text.length > 90 ? text.slice(0, 89) + "\u2026" : text)
  .replaceAll("\\", "\\\\").replaceAll("&", "&amp;").replace(/[\u0000-\u001f\u007f-\u009f\ud800-\udfff]/gu, "\ufffd");

async function draw(view, canvas, grouped, picked) {
  const turn = (canvas.turn = (canvas.turn || 0) + 1);
  try {
    const { list, home, nodes } = boxes(view, grouped);
    const place = new Map(list.map((b, i) => [b, i]));
    const edges = new Map();
    nodes.forEach((n, i) => {
      for (const j of n[NODE.inputs]) {
        const [tail, head] = [place.get(home.get(j)), place.get(home.get(i))];
        if (tail !== head) {
          const weak = nodes[j][NODE.role] === "input";
          edges.set(tail + ">" + head, { tail: "n" + tail, head: "n" + head, attributes: weak ? { color: "#9aa1ab" } : {} });
        }
      }
    });
    const graph = {
      directed: true,
      graphAttributes: { rankdir: "TB", nodesep: 0.22, ranksep: 0.3, bgcolor: "transparent", pad: 0.08 },
      nodeAttributes: { shape: "box", style: "filled", fontname: "Arial", fontsize: 11, margin: "0.14,0.06", height: 0.3 },
      edgeAttributes: { color: "#4b5563", arrowsize: 0.6 },
      nodes: list.map((b, i) => {
        const c = b.mark || !OUTSIDE.has(b.role) ? COLOURS[b.mark] || COLOURS[""] : COLOURS.outside;
        const style = ["filled", OUTSIDE.has(b.role) ? "rounded" : "", b.mark === "removed" ? "dashed" : ""].filter(Boolean).join(",");
        return { name: "n" + i, attributes: { id: "n" + i, label: label(b, view, nodes, grouped).map(plain).join("\\n"),
          fillcolor: c.fill, color: c.line, style, penwidth: b.mark && b.mark !== "removed" ? 1.8 : 1 } };
      }),
      edges: [...edges.values()],
    };
    const viz = await graphviz();
    if (canvas.turn !== turn) return;
    const svg = viz.renderSVGElement(graph);
    dress(svg, list, view, nodes, picked);
    // Shrunk to the pane where that leaves it readable; scrolled otherwise.
    const natural = parseFloat(svg.style.width);
    if (grouped && natural * 0.7 > canvas.clientWidth) canvas.closest(".panes").classList.add("one");
    svg.style.minWidth = `${Math.round(natural * (grouped ? 0.62 : 0.8))}px`;
    canvas.replaceChildren(svg);
    // Where it does not fit, begin at what matters.
    const start = svg.querySelector("g.node.role-row, g.node.mark-failed, g.node.mark-new");
    if (start) {
      const [a, b] = [start.getBoundingClientRect(), canvas.getBoundingClientRect()];
      canvas.scrollLeft += a.left + a.width / 2 - b.left - b.width / 2;
      canvas.scrollTop += Math.max(0, a.top - b.top - b.height / 3);
    }
  } catch (error) {
    canvas.replaceChildren(el("p", { class: "none" }, "This picture could not be drawn (" + error.message + "); the list below says the same."));
  }
}

function dress(svg, list, view, nodes, picked) {
  svg.setAttribute("role", "group");
  const width = parseFloat(svg.getAttribute("width"));
  svg.style.width = `${Math.round(width * 1.25)}px`;
  svg.removeAttribute("width");
  svg.removeAttribute("height");
  for (const title of svg.querySelectorAll("title")) title.remove();
  for (const g of svg.querySelectorAll("g.node")) {
    const b = list[Number(g.id.slice(1))];
    g.removeAttribute("id");
    g.classList.add("mark-" + (b.mark || "none"), "role-" + b.role.replace(" ", "-"));
    g.dataset.nodes = b.nodes.map((i) => view.names[i]).join(" ");
    g.setAttribute("tabindex", "0");
    g.setAttribute("role", "button");
    g.setAttribute("aria-label", [...g.querySelectorAll("text")].map((t) => t.textContent).join(" "));
    const show = () => {
      for (const other of picked.parentElement.querySelectorAll("g.node.chosen")) other.classList.remove("chosen");
      g.classList.add("chosen");
      picked.replaceChildren(nodeTable(view, b.nodes));
    };
    g.addEventListener("click", show);
    g.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); show(); }
    });
  }
}

let loading = null;
function graphviz() {
  loading = loading || (async () => {
    const packed = Uint8Array.from(atob(document.getElementById("viz-source").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    return window.Viz.instance();
  })();
  return loading;
}
