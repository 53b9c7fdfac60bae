// The generations that a failure or a loss ended, and the failures of workers from the log directories.
import { clock, duration, fill, h } from "./dom.js";
import { request } from "./session.js";

const SHOWN = 100;

// Requests, joining nodes and success end a generation too, but they are no failures.
export function isFailure(generation) {
  return generation.end === "failed" || generation.end === "lost";
}

export function failures(element) {
  let reports = { failures: [], problem: "", folders: [] };
  let requested = "";
  const list = h("div", { id: "failure-list" });
  const about = h("p", { class: "about" });
  element.append(h("section", {}, h("h2", {}, "Failures"), about, list));

  async function read(mark) {
    requested = mark;
    const response = await request("/failures").catch(() => null);
    if (response?.ok) reports = await response.json();
  }

  function render(state) {
    const all = state.generations;
    const ended = all.filter(isFailure).slice(-SHOWN).reverse();
    const mark = `${ended.length} ${ended[0]?.number} ${state.job.end?.outcome}`;
    if (mark !== requested) read(mark).then(() => render(state));
    about.textContent = reports.problem || (reports.folders.length ? "" : "Tracebacks and the end of stderr are shown here if the dashboard can read the job's log directories (--log-dir).");
    fill(list, JSON.stringify([ended, reports.failures.length, all.at(-1)?.stages]), () => ended.length ? ended.map((one, at) => failure(one, all, at === 0)) : h("p", {}, "None so far."));
  }

  function failure(one, all, isOpen) {
    const next = all.find((other) => other.number === one.number + 1);
    const workers = reports.failures.filter((other) => other.generation === one.number);
    const stages = next ? Object.entries(next.stages).map(([stage, seconds]) => `${stage} ${duration(seconds)}`) : [];
    return h("details", isOpen ? { open: true } : {},
      h("summary", {}, h("strong", {}, `generation ${one.number}`), " ", h("span", { class: "dim" }, one.ended === null ? "" : clock(one.ended)), " ", one.ended_by || "the reason is unknown"),
      h("div", {},
        h("dl", { class: "facts" }, ...[
          ["cause", one.ended_by || "–"], ["ran for", duration(one.ran_s ?? NaN)], ...(next ? [["restart", one.is_charged ? "charged" : "not charged"],
            ["restart took", `${duration(next.down_s)}${stages.length ? ` (${stages.join(", ")})` : ""}`]] : []),
        ].flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
        h("p", {}, h("a", { href: `#timeline?generation=${one.number}` }, "Show it in the timeline")),
        ...workers.filter((other) => !other.consequence).map(worker)));
  }

  function worker(one) {
    const texts = [["Message", one.message], ["Traceback", one.traceback], ["Stacks", one.stacks], ["The end of stderr", one.stderr_tail.trim() === one.traceback.trim() ? "" : one.stderr_tail]];
    return h("div", { class: "worker" }, h("h3", {}, `Rank ${one.rank}`),
      h("dl", { class: "facts" }, ...[["worker", `local rank ${one.local_rank}, pid ${one.pid}, on ${one.node || one.host}`], ["ending", one.ending], ["reason", one.detail]]
        .filter(([, value]) => value).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      ...texts.filter(([, text]) => text.trim()).flatMap(([title, text]) => [h("h4", {}, title), h("pre", { tabindex: 0 }, text.trim())]));
  }

  return { render };
}
