"use strict";
// Everything that comes from a model, a path or a graph enters the page as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const NODE = { op: 0, value: 1, inputs: 2, role: 3, mark: 4, module: 5, stack: 6 };
  const LINE = { file: 0, line: 1, fn: 2, text: 3, context: 4 };
  const many = data.graphs.length > 1;

  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
    }
    node.append(...children.filter((c) => c !== null && c !== undefined));
    return node;
  }

  // ---- the table ---------------------------------------------------------------------------------

  const columns = [
    { name: "site", text: (s) => s.key },
    { name: "consumers", text: (s) => s.readers },
    { name: "status", text: (s) => s.status },
    { name: "reason", text: (s) => s.reason },
    { name: "format", text: (s) => s.format },
    { name: "kernel", text: (s) => s.kernel },
    ...(many ? [{ name: "graph", text: (s) => s.graph, number: true }] : []),
  ];
  const table = document.getElementById("sites");
  const body = table.tBodies[0];
  const collator = new Intl.Collator("en", { numeric: true });
  const rows = data.sites.map((site, i) => ({ site, i, row: null, detail: null, search: searchable(site) }));
  const byKey = new Map(rows.map((r) => [r.site.key, r]));
  let sorted = { column: null, down: false };

  function searchable(site) {
    return [site.key, site.norm, ...site.consumers, site.status, site.reason, site.format, site.kernel,
      site.detail].join("\n").toLowerCase();
  }

  // A path may be broken behind its dots, and nowhere within a name that fits the column.
  function path(text) {
    const span = el("span", { class: "path" });
    text.split(/(?<=[.,#])/).forEach((part, i) => span.append(...(i ? [el("wbr"), part] : [part])));
    return span;
  }

  function hash(site) {
    return "#site-" + encodeURIComponent(site.key);
  }

  function makeRow(r) {
    const s = r.site;
    const link = el("a", { href: hash(s), class: "site", tabindex: "-1" }, path(s.key));
    const row = el("tr", { class: "site-row " + s.status, tabindex: "0", "aria-expanded": "false",
      "data-key": s.key }, el("td", {}, el("span", { class: "arrow", "aria-hidden": "true" }), link));
    for (const column of columns.slice(1)) {
      const text = String(column.text(s));
      const cell = el("td", { class: column.name });
      if (column.name === "status") cell.append(el("span", { class: "badge " + s.status }, text));
      else if (column.name === "consumers") cell.append(path(text));
      else cell.append(text);
      row.append(cell);
    }
    return row;
  }

  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr.site-row");
    if (!row || String(window.getSelection())) return;
    event.preventDefault();
    toggle(byKey.get(row.dataset.key));
  });
  body.addEventListener("keydown", (event) => {
    const row = event.target;
    if (!row.matches("tr.site-row")) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      toggle(byKey.get(row.dataset.key));
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const step = event.key === "ArrowDown" ? "nextElementSibling" : "previousElementSibling";
      let next = row[step];
      while (next && !next.matches("tr.site-row")) next = next[step];
      if (next) { event.preventDefault(); next.focus(); }
    }
  });

  function makeHead() {
    const head = table.tHead.rows[0];
    for (const column of columns) {
      const button = el("button", { type: "button" }, column.name);
      const cell = el("th", { scope: "col", "aria-sort": "none", class: column.name }, button);
      button.addEventListener("click", () => {
        sorted = { column, down: sorted.column === column && !sorted.down };
        for (const th of head.cells) th.setAttribute("aria-sort", "none");
        cell.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
        fill();
      });
      head.append(cell);
    }
  }

  const filters = { text: null, status: null, reason: null, format: null, kernel: null, graph: null };
  const value = { status: (s) => s.status, reason: (s) => s.reason, format: (s) => s.format,
    kernel: (s) => s.kernel, graph: (s) => String(s.graph) };

  function makeFilters() {
    const form = document.getElementById("filters");
    for (const name of Object.keys(filters)) {
      const input = document.getElementById("filter-" + name);
      filters[name] = input;
      if (name !== "text") {
        const found = [...new Set(data.sites.map(value[name]))].filter((v) => v !== "").sort(collator.compare);
        input.append(el("option", { value: "" }, "all"), ...found.map((v) => el("option", { value: "=" + v }, v)));
        if (found.length < 2) input.parentElement.hidden = true;
      }
      input.addEventListener("input", () => fill());
    }
    form.addEventListener("reset", () => setTimeout(() => fill()));
    form.addEventListener("submit", (event) => event.preventDefault());
    for (const button of document.querySelectorAll("button.reason")) {
      button.addEventListener("click", () => {
        filters.reason.value = "=" + button.dataset.reason;
        fill();
        form.scrollIntoView();
      });
    }
  }

  function shown(r) {
    const words = filters.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    return words.every((w) => r.search.includes(w)) && Object.keys(value).every(
      (name) => !filters[name].value || filters[name].value === "=" + value[name](r.site));
  }

  const CHUNK = 250;
  let filling = 0;

  // The first rows at once, the others while the reader reads; all at once where one is asked for.
  function fill(whole) {
    const list = rows.filter(shown);
    const { column, down } = sorted;
    list.sort((a, b) => (column ? (down ? -1 : 1) * compare(column, a.site, b.site) : 0) || a.i - b.i);
    const turn = (filling += 1);
    const more = (from, to) => {
      if (turn !== filling) return;
      const made = document.createDocumentFragment();
      for (const r of list.slice(from, to)) {
        r.row = r.row || makeRow(r);
        made.append(r.row);
        if (r.detail && !r.detail.hidden) made.append(r.detail);
      }
      body.append(made);
      if (to < list.length) setTimeout(more, 0, to, to + CHUNK);
    };
    body.replaceChildren();
    more(0, whole === true ? list.length : CHUNK);
    document.getElementById("shown").textContent =
      list.length === rows.length ? `${rows.length} sites` : `${list.length} of ${rows.length} sites`;
  }

  function compare(column, a, b) {
    const [x, y] = [column.text(a), column.text(b)];
    return column.number ? x - y : collator.compare(x, y);
  }

  function toggle(r, open = r.row.getAttribute("aria-expanded") !== "true", scroll = false) {
    if (open && !r.detail) {
      r.detail = el("tr", { class: "detail" }, el("td", { colspan: columns.length }, detail(r.site)));
    }
    if (r.detail) r.detail.hidden = !open;
    r.row.setAttribute("aria-expanded", String(open));
    if (open) {
      r.row.after(r.detail);
      if (r.detail.draw) r.detail.draw();
      history.replaceState(null, "", hash(r.site));
      if (scroll) { r.row.scrollIntoView(); r.row.focus({ preventScroll: true }); }
    } else if (r.detail) {
      r.detail.remove();
    }
  }

  function follow() {
    if (!location.hash.startsWith("#site-")) return;
    let key = location.hash.slice(6);
    try { key = decodeURIComponent(key); } catch { /* as it is */ }
    const r = byKey.get(key);
    if (!r) return;
    if (!shown(r)) document.getElementById("filters").reset();
    if (!r.row || !r.row.isConnected || !shown(r)) fill(true);
    toggle(r, true, true);
  }

  // ---- one site ----------------------------------------------------------------------------------

  function detail(site) {
    const box = el("section", { class: "site-detail", "aria-label": "Site " + site.id });
    if (site.status === "declined") box.append(declined(site));
    box.append(pictures(site));
    const columns = el("div", { class: "columns" });
    columns.append(lines(site), facts(site));
    box.append(columns);
    box.append(kernels(site));
    return box;
  }

  function declined(site) {
    const reason = data.reasons[site.reason] || { what: "", advice: "" };
    const box = el("div", { class: "why" }, el("p", {}, el("strong", {}, site.reason), ": " + reason.what + "."));
    if (site.detail) {
      const long = site.detail.includes("\n");
      box.append(el("p", {}, el("span", { class: "label" }, "found"), " ", long ? "" : el("code", {}, site.detail)));
      if (long) box.append(el("pre", {}, site.detail));
    }
    if (site.computed) {
      box.append(el("table", { class: "facts near" }, el("caption", {}, "Nearest miss"), el("tbody", {},
        el("tr", {}, el("th", { scope: "row" }, "computed"), el("td", {}, el("code", {}, site.computed))),
        el("tr", {}, el("th", { scope: "row" }, "expected"), el("td", {}, el("code", {}, site.expected))))));
    }
    if (reason.advice) box.append(el("p", { class: "advice" }, el("span", { class: "label" }, "what you can do"), " " + reason.advice + "."));
    return box;
  }

  function facts(site) {
    const body = el("tbody");
    const row = (name, content) => body.append(el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, content)));
    row("norm", path(site.norm || "?"));
    const list = (paths) => el("ul", { class: "paths" }, ...paths.map((p) => el("li", {}, path(p || "?"))));
    row("consumers", site.consumers.length ? list(site.consumers) : "?");
    if (site.also.length) row("also read, unquantised, by", list(site.also));
    for (const [name, v] of Object.entries(site.spec)) {
      if (v !== null && v !== "") row(name.replaceAll("_", " "), typeof v === "object" ? JSON.stringify(v) : typeof v === "number" ? String(Number(v.toPrecision(9))) : String(v));
    }
    if (site.node) row("graph node", site.node);
    if (many) row("graph", `${site.graph} (${data.graphs[site.graph]})`);
    return el("div", { class: "spec" }, el("h3", {}, "Spec"), el("table", { class: "facts" }, body));
  }

  function kernels(site) {
    const box = el("div", { class: "kernels" });
    if (!site.kernels.length) return box;
    box.append(el("h3", {}, "Generated code"));
    for (const use of site.kernels) {
      const [name, language, code] = data.kernels[use.kernel];
      const part = el("details", {}, el("summary", {}, el("code", {}, name), ` (${language})`));
      if (use.call) part.append(el("p", { class: "label" }, "called as"), el("pre", { class: "call" }, use.call));
      if (code) part.append(el("p", { class: "label" }, "the kernel"), el("pre", { class: "code", tabindex: "0" }, code));
      box.append(part);
    }
    return box;
  }

  // ---- the lines of code -------------------------------------------------------------------------

  function lines(site) {
    const box = el("div", { class: "source" }, el("h3", {}, "Source"));
    const picture = site.before && data.pictures[site.before.picture];
    const counts = new Map();
    for (const node of picture ? picture.nodes : []) {
      const stack = node[NODE.stack];
      if (stack === null) continue;
      const roles = counts.get(stack) || new Map();
      roles.set(node[NODE.role], (roles.get(node[NODE.role]) || 0) + 1);
      counts.set(stack, roles);
    }
    if (!counts.size) {
      box.append(el("p", { class: "none" }, "The graph does not say which lines its nodes came from."));
      return box;
    }
    // One block for the lines of one function that was called from one place.
    const blocks = new Map();
    for (const [stack, roles] of counts) {
      const places = data.stacks[stack].map((i) => data.lines[i]);
      const last = places[places.length - 1];
      const outer = places.slice(0, -1);
      const key = JSON.stringify([last[LINE.file], last[LINE.fn], data.stacks[stack].slice(0, -1)]);
      if (!blocks.has(key)) blocks.set(key, { outer, lines: [] });
      blocks.get(key).lines.push({ line: last, roles });
    }
    for (const { outer, lines } of blocks.values()) {
      const part = el("div", { class: "frame" }, place(lines[0].line, lines), code(lines));
      if (outer.length) {
        const calls = el("details", {}, el("summary", {}, `called through ${outer.length} line${outer.length > 1 ? "s" : ""}`));
        for (const line of outer.reverse()) calls.append(place(line, [{ line }]), code([{ line }]));
        part.append(calls);
      }
      box.append(part);
    }
    return box;
  }

  function place(line, lines) {
    const numbers = [...new Set(lines.map((l) => l.line[LINE.line]))].sort((a, b) => a - b);
    const file = el("code", {});
    line[LINE.file].split(/(?<=[/\\])/).forEach((part) => file.append(part, el("wbr")));
    file.append(":" + numbers.join(", "));
    return el("p", { class: "place" }, file, " in ", el("code", {}, line[LINE.fn]));
  }

  function code(lines) {
    const text = new Map();
    const here = new Map();
    for (const { line, roles } of lines) {
      for (const [number, content] of line[LINE.context]) text.set(number, content);
      if (!text.has(line[LINE.line])) text.set(line[LINE.line], line[LINE.text]);
      const known = here.get(line[LINE.line]) || new Map();
      for (const [role, n] of roles || []) known.set(role, (known.get(role) || 0) + n);
      here.set(line[LINE.line], known);
    }
    const numbers = [...text.keys()].sort((a, b) => a - b);
    const list = el("ol", { class: "code" });
    numbers.forEach((number, i) => {
      if (i && number > numbers[i - 1] + 1) list.append(el("li", { class: "gap" }, "\u22ee"));
      const roles = here.get(number);
      const what = roles && [...roles].map(([role, n]) => `${role} \u00d7${n}`).join(", ");
      list.append(el("li", { value: number, class: roles ? "here" : null }, el("code", {}, text.get(number) || " "),
        what ? el("span", { class: "roles", title: "nodes of the graph that come from this line" }, what) : null));
    });
    return list;
  }

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
    "weight cast": "weight cast", backward: "backward", reader: "read elsewhere", rewrite: "views and conversions" };
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

  makeHead();
  makeFilters();
  fill();
  follow();
  window.addEventListener("hashchange", follow);
  // When the table could be used, in milliseconds since the page was asked for.
  document.documentElement.dataset.ready = String(performance.now());
})();
