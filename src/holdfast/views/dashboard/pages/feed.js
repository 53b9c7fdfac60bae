// The state of the job: a snapshot, then the sections that change. The browser connects again by
// itself when the stream ends, and begins with a snapshot.

const QUIET_MS = 12000; // Without even a ping: the server hangs, or the network does.
const EVENTS_KEPT = 1000;

export const state = { job: null, nodes: [], ranks: { rank: [] }, generations: [], spans: [], events: [], live: "wait" };
const listeners = new Set();
let wanted = false;

export function onChange(listener) {
  listeners.add(listener);
}

function changed() {
  if (wanted) return;
  wanted = true;
  requestAnimationFrame(() => {
    wanted = false;
    for (const listener of listeners) listener(state);
  });
}

export function connect() {
  let heard = Date.now();
  let source = null;

  function live(kind) {
    if (state.live === kind) return;
    state.live = kind;
    changed();
  }

  function take(event) {
    heard = Date.now();
    const sections = JSON.parse(event.data);
    if (event.type === "snapshot") state.events = [];
    const { news, ...rest } = sections;
    Object.assign(state, rest);
    if (news) state.events = [...state.events, ...news].slice(-EVENTS_KEPT);
    state.live = "on";
    changed();
  }

  function open() {
    source?.close();
    heard = Date.now();
    source = new EventSource("/feed");
    source.addEventListener("snapshot", take);
    source.addEventListener("update", take);
    source.addEventListener("ping", () => { heard = Date.now(); live("on"); });
    source.addEventListener("error", async () => {
      live("wait");
      if (source.readyState !== EventSource.CLOSED) return;
      // It was refused: the session is over, or the server is.
      const answer = await fetch("/session").catch(() => null);
      if (answer?.status === 401) location.assign("/login");
      else setTimeout(open, 2000);
    });
  }

  open();
  setInterval(() => { if (Date.now() - heard > QUIET_MS) { live("wait"); open(); } }, 2000);
}
