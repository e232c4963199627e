// Markdown of a model as DOM nodes. What a model writes is text: it never becomes HTML, an image is
// never fetched, and a link goes to http or https only.

import { button, copy, element } from "../dom.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ROW = /^\s*\|.*\|\s*$/;
const RULE = /^\s*\|?[\s:|-]*-[\s:|-]*\|?\s*$/;

/** The text in blocks that are rendered alone: [{kind, lines, language}]. */
function blocks(text) {
  const found = [];
  let open = null; // the fence that would end a code block
  for (const line of text.split("\n")) {
    const last = found.at(-1);
    const fence = FENCE.exec(line);
    if (open) {
      if (fence && fence[1].startsWith(open) && !fence[2]) open = null;
      else last.lines.push(line);
    } else if (fence) {
      open = fence[1];
      found.push({ kind: "code", lines: [], language: fence[2] });
    } else if (!line.trim()) {
      found.push({ kind: "gap", lines: [] });
    } else {
      const kind = HEADING.test(line) ? "heading"
        : ROW.test(line) ? "table"
        : ITEM.test(line) ? "list"
        : line.startsWith(">") ? "quote"
        : last?.kind === "list" && /^\s/.test(line) ? "list"
        : "paragraph";
      if (last?.kind === kind && kind !== "heading") last.lines.push(line);
      else found.push({ kind, lines: [line] });
    }
  }
  return found.filter((block) => block.kind !== "gap");
}

/** Show `text` in `box`. Blocks that are there already stay, so a stream renders its end only. */
export function showMarkdown(box, text) {
  const wanted = blocks(text);
  wanted.forEach((block, at) => {
    const source = JSON.stringify(block);
    const there = box.children[at];
    if (there?.markdown === source) return;
    const made = render(block);
    made.markdown = source;
    if (there) there.replaceWith(made);
    else box.append(made);
  });
  while (box.children.length > wanted.length) box.lastChild.remove();
}

function render({ kind, lines, language }) {
  if (kind === "code") return code(lines.join("\n"), language);
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    return element(`h${Math.min(6, marks.length + 1)}`, {}, ...inline(text));
  }
  if (kind === "list") return list(lines);
  if (kind === "quote") {
    const quote = element("blockquote");
    showMarkdown(quote, lines.map((line) => line.replace(/^> ?/, "")).join("\n"));
    return quote;
  }
  if (kind === "table" && lines.length > 1 && RULE.test(lines[1])) return table(lines);
  return element("p", {}, ...inline(lines.join("\n")));
}

function code(text, language) {
  const copying = button("Copy", () => copy(text, copying));
  return element(
    "figure",
    { className: "code" },
    element("figcaption", {}, language || "text", copying),
    element("pre", {}, element("code", { textContent: text })),
  );
}

/** Lists in lists, by how far their items are indented. */
function list(lines) {
  const root = element("div");
  const levels = []; // {indent, list}
  let item = null;
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (!found) {
      item?.append(" ", ...inline(line.trim()));
      continue;
    }
    const [, space, mark, text] = found;
    while (levels.length && levels.at(-1).indent > space.length) levels.pop();
    if (!levels.length || levels.at(-1).indent < space.length) {
      const number = parseInt(mark, 10);
      const made = element(Number.isNaN(number) ? "ul" : "ol");
      if (number > 1) made.start = number;
      (levels.length ? levels.at(-1).list.lastChild : root).append(made);
      levels.push({ indent: space.length, list: made });
    }
    item = element("li", {}, ...inline(text));
    levels.at(-1).list.append(item);
  }
  return root;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, tag) =>
    element("tr", {}, ...cells(line).map((cell) => element(tag, {}, ...inline(cell))));
  return element(
    "div",
    { className: "wide" },
    element(
      "table",
      {},
      element("thead", {}, row(lines[0], "th")),
      element("tbody", {}, ...lines.slice(2).map((line) => row(line, "td"))),
    ),
  );
}

const INLINE =
  /(`+)(.{1,2000}?)\1(?!`)|\*\*(?=\S)([^]{0,1000}?\S)\*\*|\*(?=[^\s*])([^*\n]{0,500}[^\s*])\*|\[([^\]\n]{1,500})\]\((\S{1,2000}?)\)|(https?:\/\/[^\s<>"'`)\]]{1,2000})/g;

/** Nodes of a line or a paragraph. */
function inline(text, depth = 0) {
  const made = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , codeText, bold, italic, label, target, bare] = found;
    made.push(text.slice(at, found.index));
    at = found.index + whole.length;
    const inner = (part) => (depth < 4 ? inline(part, depth + 1) : [part]);
    if (codeText !== undefined) made.push(element("code", { textContent: codeText }));
    else if (bold !== undefined) made.push(element("strong", {}, ...inner(bold)));
    else if (italic !== undefined) made.push(element("em", {}, ...inner(italic)));
    else made.push(link(label ?? bare, target ?? bare, whole));
  }
  made.push(text.slice(at));
  return made.filter((node) => node !== "");
}

/** A link that says where it goes; the text as it was if that is not the web. */
function link(label, target, whole) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return whole;
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return whole;
  return element("a", {
    textContent: label,
    href: url.href,
    title: url.href,
    target: "_blank",
    rel: "noopener noreferrer nofollow",
  });
}
