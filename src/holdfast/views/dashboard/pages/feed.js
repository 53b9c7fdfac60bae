// The state of the job: a snapshot, then the sections that change. When the stream ends, the page
// reconnects and receives a new snapshot.
import { lines } from "./session.js";

const QUIET_MS = 12000; // After this time without even a ping, the page reconnects.
const RETRY_MS = 2000;
const EVENTS_KEPT = 1000;

export const state = { job: null, nodes: [], ranks: { rank: [] }, generations: [], spans: [], series: null, events: [], live: "wait", canAct: false, isLost: true };
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
  let receivedAt = 0;
  let reading = null;

  function live(kind) {
    if (state.live === kind) return;
    state.live = kind;
    changed();
  }

  function take({ kind, news, ...sections }) {
    if (kind === "snapshot") state.events = [];
    Object.assign(state, sections);
    if (news) state.events = [...state.events, ...news].slice(-EVENTS_KEPT);
    if (kind !== "ping") changed();
    live("on");
  }

  async function read() {
    const own = (reading = new AbortController());
    receivedAt = Date.now();
    try {
      for await (const update of lines("/feed", own.signal)) {
        if (reading !== own) return;
        receivedAt = Date.now();
        take(update);
      }
    } catch { /* The server does not respond, or closed the connection. */ }
    if (reading !== own) return;
    live("wait");
    setTimeout(() => { if (reading === own) read(); }, RETRY_MS);
  }

  read();
  setInterval(() => {
    if (Date.now() - receivedAt < QUIET_MS) return;
    live("wait");
    reading.abort();
    read();
  }, RETRY_MS);
}
