// Elements and texts. Data from workers and nodes becomes text here, never HTML.

export function h(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  set(made, attributes);
  made.append(...children.filter((one) => one !== null && one !== undefined && one !== false));
  return made;
}

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  set(made, attributes);
  made.append(...children);
  return made;
}

function set(made, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, String(value));
  }
}

// Replaces the children only if `key`, which stands for their content, has changed. Keeps the focus
// and the scroll positions.
const shown = new WeakMap();
const SCROLLED = ".wide, .scroll-y";
export function fill(parent, key, make) {
  if (shown.get(parent) === key) return;
  const places = [...parent.querySelectorAll(SCROLLED)].map((one) => [one.scrollLeft, one.scrollTop]);
  const focused = parent.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
  shown.set(parent, key);
  parent.replaceChildren(...[make()].flat());
  parent.querySelectorAll(SCROLLED).forEach((one, at) => { [one.scrollLeft, one.scrollTop] = places[at] ?? [0, 0]; });
  if (focused) parent.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function duration(seconds) {
  if (!(seconds >= 0)) return "–";
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
  const s = Math.round(seconds);
  const parts = [[Math.floor(s / 86400), "d"], [Math.floor(s / 3600) % 24, "h"], [Math.floor(s / 60) % 60, "min"], [s % 60, "s"]];
  const first = parts.findIndex(([count]) => count);
  return parts.slice(first, first + 2).filter(([count]) => count).map(([count, unit]) => `${count} ${unit}`).join(" ");
}

export function clock(wall) {
  return new Date(wall * 1000).toTimeString().slice(0, 8);
}

export function bytes(count) {
  if (!count) return "–";
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (count >= size) return `${(count / size).toPrecision(3)} ${unit}`;
  }
  return `${count} B`;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || value < 0) return "–";
  return Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(digits)).toLocaleString("en");
}

export function percent(share) {
  if (share === null || share < 0) return "–";
  if (share > 0 && share < 0.0005) return "<0.1 %";
  return `${(100 * share).toFixed(share >= 0.9995 ? 0 : 1)} %`;
}

// Returns a sorted list of ranks as text, such as "0, 8-15".
export function ranges(ranks) {
  const spans = [];
  for (const rank of ranks) {
    const last = spans[spans.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank;
    else spans.push([rank, rank]);
  }
  return spans.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ");
}

export function table(heads, rows) {
  const cell = (kind, value, at) => h(kind, heads[at].startsWith("#") ? { class: "n" } : {}, ...[value].flat());
  return h("div", { class: "wide" }, h("table", {},
    h("thead", {}, h("tr", {}, ...heads.map((head, at) => cell("th", head.replace("#", ""), at)))),
    h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((value, at) => cell("td", value, at)))))));
}

export function pill(state) {
  return h("span", { class: `pill ${state.replace(/[^a-z]/g, "-")}` }, state);
}

export function toast(text, kind = "") {
  const one = h("div", { class: `toast ${kind}` }, text);
  document.getElementById("toasts").append(one);
  setTimeout(() => one.remove(), 8000);
}
