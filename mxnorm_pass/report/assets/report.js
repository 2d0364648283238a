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

makeHead();
makeFilters();
fill();
follow();
window.addEventListener("hashchange", follow);
// When the table could be used, in milliseconds since the page was asked for.
document.documentElement.dataset.ready = String(performance.now());
