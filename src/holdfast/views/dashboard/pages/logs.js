// The output of any ranks: the last lines, the results of a search, or new lines as workers write them.
import { h } from "./dom.js";
import * as session from "./session.js";

const LINES_MAX = 5000; // In the page; older ones are removed.
const COLOURS = 8;

export function logs(element) {
  let reading = null;
  let count = 0;
  let waiting = [];
  let isPlanned = false;
  const ranks = h("input", { id: "logs-ranks", placeholder: "all, or 0,8-15", size: 12, autocomplete: "off" });
  const grep = h("input", { id: "logs-grep", type: "search", placeholder: "text in a line", size: 18, autocomplete: "off" });
  const tail = h("select", { id: "logs-tail" }, ...["50", "200", "1000", "10000"].map((one) => h("option", { value: one, ...(one === "200" ? { selected: true } : {}) }, one)));
  const follow = h("input", { id: "logs-follow", type: "checkbox", checked: true });
  const status = h("p", { class: "about", role: "status" });
  const lines = h("div", { class: "lines mono", tabindex: 0, role: "log", "aria-label": "Lines of workers", "aria-live": "off", id: "log-lines" });
  const form = h("form", { class: "controls", onsubmit: (event) => { event.preventDefault(); read(); } },
    h("label", {}, "Ranks ", ranks), h("label", {}, "Search ", grep), h("label", {}, "Last ", tail, " lines of each"), h("label", {}, follow, " follow"),
    h("button", { type: "submit", class: "primary" }, "Show"), h("button", { type: "button", onclick: () => stop("stopped") }, "Stop"));
  element.append(h("section", {}, h("h2", {}, "Logs"), form, status, lines));
  follow.addEventListener("change", () => read());

  function stop(why) {
    reading?.abort();
    reading = null;
    if (why) status.textContent = `${count.toLocaleString("en")} lines; ${why}`;
  }

  async function read() {
    stop("");
    const own = (reading = new AbortController());
    count = 0;
    waiting = [];
    lines.replaceChildren();
    status.textContent = "reading …";
    // A search covers the whole output of this generation.
    const query = new URLSearchParams({ ranks: ranks.value, grep: grep.value, tail: grep.value ? "all" : tail.value, follow: follow.checked ? "1" : "0" });
    try {
      for await (const piece of session.lines(`/logs?${query}`, own.signal)) take(piece);
      if (reading === own) { flush(); status.textContent ||= ""; showStatus("end of the output"); }
    } catch (error) {
      if (error.name !== "AbortError" && reading === own) showStatus(error.message);
    }
  }

  function showStatus(why) {
    status.textContent = `${count.toLocaleString("en")} lines${count > LINES_MAX ? `, the last ${LINES_MAX.toLocaleString("en")} are shown` : ""}; ${why}`;
  }

  function take(piece) {
    if (piece.problem) { waiting.push(["", "", piece.problem]); plan(); return; }
    for (const line of piece.lines) waiting.push([piece.rank, piece.stream, line]);
    count += piece.lines.length;
    if (waiting.length > LINES_MAX) waiting = waiting.slice(-LINES_MAX);
    plan();
  }

  function plan() {
    if (isPlanned) return;
    isPlanned = true;
    requestAnimationFrame(flush);
  }

  function flush() {
    isPlanned = false;
    if (!waiting.length) return;
    const isAtEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
    const made = waiting.map(([rank, stream, text]) => h("div", { class: stream === "stderr" ? "err" : "" },
      h("span", { class: `rank c${rank % COLOURS}` }, rank === "" ? "!" : String(rank)), " ", text));
    waiting = [];
    lines.append(...made);
    while (lines.childElementCount > LINES_MAX) lines.firstElementChild.remove();
    if (isAtEnd) lines.scrollTop = lines.scrollHeight;
    showStatus(follow.checked ? "following" : "reading …");
  }

  return {
    render: () => {},
    open: (query, isNew) => {
      if (query.has("ranks") && query.get("ranks") !== ranks.value) { ranks.value = query.get("ranks"); read(); }
      else if (isNew && !reading) read();
    },
  };
}
