// The state of the job: a snapshot, then the sections that change. When the stream ends, the browser
// reconnects by itself and receives a new snapshot.

const QUIET_MS = 12000; // After this time without even a ping, the page reconnects.
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
  let receivedAt = Date.now();
  let source = null;

  function live(kind) {
    if (state.live === kind) return;
    state.live = kind;
    changed();
  }

  function take(event) {
    receivedAt = Date.now();
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
    receivedAt = Date.now();
    source = new EventSource("/feed");
    source.addEventListener("snapshot", take);
    source.addEventListener("update", take);
    source.addEventListener("ping", () => { receivedAt = Date.now(); live("on"); });
    source.addEventListener("error", async () => {
      live("wait");
      if (source.readyState !== EventSource.CLOSED) return;
      // The server rejected the stream, or does not respond: find out whether the session has expired.
      const response = await fetch("/session").catch(() => null);
      if (response?.status === 401) location.assign("/login");
      else setTimeout(open, 2000);
    });
  }

  open();
  setInterval(() => { if (Date.now() - receivedAt > QUIET_MS) { live("wait"); open(); } }, 2000);
}
