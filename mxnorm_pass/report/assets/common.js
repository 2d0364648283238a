// What the parts of the page's script share. They are joined into one function (html.py).
// Everything that comes from a model, a path or a graph enters the page as text, never as markup.
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
