/** The live page: one stream of the fleet's state, and the panels that show it. */

import { Announcer } from "./announcer.js";
import { Api } from "./api.js";
import { byId, setText } from "./dom.js";
import { DrainDialog } from "./drain_dialog.js";
import { FleetStream } from "./fleet_stream.js";
import { History } from "./history.js";
import { IdentityDialog } from "./identity_dialog.js";
import { Identity } from "./identity.js";
import { LoadPanel } from "./load_panel.js";
import { Playground } from "./playground.js";
import { PrefixesPanel } from "./prefixes_panel.js";
import { RequestsPanel } from "./requests_panel.js";
import { StatusBar } from "./status_bar.js";
import { SummaryPanel } from "./summary_panel.js";
import { TenantsPanel } from "./tenants_panel.js";
import { TimelinePanel } from "./timeline_panel.js";
import { WorkersPanel } from "./workers_panel.js";

/** @typedef {import("./fleet_view").FleetView} FleetView */

const identity = new Identity(sessionStorage);
const api = new Api(identity);
const announcer = new Announcer(byId("announcements"));
const announce = (/** @type {string} */ message) => announcer.say(message);

const history = new History();
const statusBar = new StatusBar(announce);
const drainDialog = new DrainDialog(api, announce);
const summary = new SummaryPanel(byId("summary"));
const workers = new WorkersPanel({ tiles: byId("tiles"), none: byId("no-workers") }, (worker) => drainDialog.ask(worker), announce);
const load = new LoadPanel({ section: byId("load"), plots: byId("plots"), choice: byId("plot-worker"), scope: byId("load-scope") }, history);
const timeline = new TimelinePanel(byId("timeline"), api);
const requests = new RequestsPanel(
  { rows: byId("request-rows"), none: byId("no-requests"), note: byId("requests-note"), scope: byId("requests-scope"), filter: byId("request-filter") },
  api,
  (request) => timeline.open(request.request_id, request.tenant),
);
const prefixes = new PrefixesPanel({ section: byId("prefixes"), rows: byId("prefix-rows"), none: byId("no-prefixes") });
const tenants = new TenantsPanel({
  section: byId("tenants"),
  head: byId("tenant-head"),
  rows: byId("tenant-rows"),
  none: byId("no-tenants"),
});
const playground = new Playground(api, (requestId) => timeline.open(requestId));

/** @param {FleetView} view */
function show(view) {
  statusBar.showRouter(view);
  summary.show(view, history.points.at(-1) ?? null);
  workers.show(view.workers, view.you.can_drain, view.at_unix_ms);
  load.show(view);
  byId("requests").hidden = !view.you.sees_requests;
  requests.show(view);
  prefixes.show(view.you.sees_requests ? view.prefixes : null);
  tenants.show(view.tenants, view.you.sees_requests);
  playground.offer([...new Set(view.workers.map((worker) => worker.model).filter(Boolean))].sort());
  for (const link of byId("sections").children) link.hidden = byId(link.hash.slice(1)).hidden;
}

/** Nothing of what another caller saw stays in the document. */
function clear() {
  history.clear();
  announcer.clear();
  summary.clear();
  load.clear();
  drainDialog.clear();
  timeline.close();
  requests.clear();
  workers.show([], false, 0);
  prefixes.show(null);
  tenants.show([], false);
  playground.clear();
  playground.offer([]);
  setText(byId("router-name"), "");
}

/** @param {import("./sse.js").ServerEvent} event */
function take({ event, data }) {
  if (event !== "snapshot" && event !== "update") return;
  const view = /** @type {FleetView} */ (JSON.parse(data));
  history.take(view, event === "snapshot");
  if (!document.hidden) show(view); // the next state comes within a second
}

/** @param {import("./fleet_stream.js").Connection} connection */
function showConnection(connection) {
  statusBar.showConnection(connection);
  const isRefused = connection.freshness === "refused";
  const hasData = connection.dataAt > 0 && !isRefused;
  if (isRefused) clear();
  byId("fleet").hidden = !hasData;
  byId("sections").hidden = !hasData;
  byId("refused").hidden = !isRefused;
  setText(byId("refused-title"), connection.refused?.status === 401 ? "An API key is needed" : "This key may not see the fleet");
  setText(byId("refused-message"), isRefused ? sentence(connection) : "");
  if (hasData) openLinkedRequest();
}

/** @param {import("./fleet_stream.js").Connection} connection */
function sentence({ refused, problem }) {
  const hadKey = identity.key !== "";
  if (refused?.status === 401 && hadKey) return `The router does not accept this key: ${problem}.`;
  if (refused?.status === 401) return "The router shows its fleet to callers with credentials only.";
  return `The router answered: ${problem}.`;
}

const stream = new FleetStream(api, "fleet/events", take, showConnection);
const identityDialog = new IdentityDialog(identity, () => {
  stream.close();
  clear();
  stream.open();
});
for (const id of ["identity-button", "refused-button"]) byId(id).addEventListener("click", () => identityDialog.ask());
byId("find-request").addEventListener("submit", (/** @type {SubmitEvent} */ event) => {
  event.preventDefault();
  const id = byId("request-id").value.trim();
  if (id !== "") timeline.open(id);
});

/** The id in an address that ends in #request=ID; "" if there is none. */
function linkedRequest() {
  if (!location.hash.startsWith("#request=")) return "";
  try {
    return decodeURIComponent(location.hash.slice("#request=".length));
  } catch (error) {
    if (error instanceof URIError) return "";
    throw error;
  }
}

let linked = linkedRequest();
function openLinkedRequest() {
  if (linked === "") return;
  const id = linked;
  linked = "";
  timeline.open(id);
}
window.addEventListener("hashchange", () => {
  linked = linkedRequest();
  openLinkedRequest();
});

stream.open();
