/** Tenants, and how much of their quotas they use. */

import { fill, h, KeyedList, setAttribute, setText } from "./dom.js";
import { count, decimal, percent } from "./format.js";
import { ShareBar } from "./share_bar.js";

/** @typedef {import("./fleet_view").TenantView} TenantView */

const NEARLY_FULL = 0.9;

export class TenantsPanel {
  /** @param {{section: any, head: Element, rows: Element, none: any}} elements */
  constructor({ section, head, rows, none }) {
    this.section = section;
    this.head = head;
    this.rows = rows;
    this.none = none;
    /** @type {string[] | null} */
    this.quotas = null;
  }

  /** @param {TenantView[]} tenants @param {boolean} isVisible */
  show(tenants, isVisible) {
    this.section.hidden = !isVisible;
    const quotas = [...new Set(tenants.flatMap((tenant) => tenant.quotas.map(({ quota }) => quota)))];
    if (this.quotas === null || quotas.join() !== this.quotas.join()) this.#newTable(quotas);
    this.list?.show(tenants);
    this.none.hidden = tenants.length > 0;
  }

  /** @param {string[]} quotas */
  #newTable(quotas) {
    this.quotas = quotas;
    const head = (/** @type {string} */ name, /** @type {string | null} */ kind) => h("th", { scope: "col", class: kind }, name);
    fill(
      this.head,
      h(
        "tr",
        {},
        head("Tenant", null),
        head("Lane", null),
        head("Weight", "number"),
        head("Running", "number"),
        ...quotas.map((quota) => head(quota.replaceAll("_", " "), null)),
        head("Refused lately", "number"),
      ),
    );
    fill(this.rows);
    this.list = new KeyedList(
      this.rows,
      (/** @type {TenantView} */ tenant) => tenant.tenant,
      () => new TenantRow(quotas),
      (row, tenant) => row.show(tenant),
    );
  }
}

class TenantRow {
  /** @param {string[]} quotas */
  constructor(quotas) {
    this.name = h("th", { scope: "row" });
    this.lane = h("td");
    this.weight = h("td", { class: "number" });
    this.running = h("td", { class: "number" });
    this.refused = h("td", { class: "number" });
    this.quotas = new Map(quotas.map((quota) => [quota, new QuotaCell()]));
    const cells = [...this.quotas.values()].map((cell) => cell.element);
    this.element = h("tr", {}, this.name, this.lane, this.weight, this.running, ...cells, this.refused);
  }

  /** @param {TenantView} tenant */
  show(tenant) {
    setText(this.name, tenant.tenant || "none");
    setText(this.lane, tenant.lane);
    setText(this.weight, decimal(tenant.weight));
    setText(this.running, count(tenant.running));
    setText(this.refused, count(tenant.refused));
    setAttribute(this.refused, "class", tenant.refused ? "number bad" : "number");
    for (const [name, cell] of this.quotas) {
      const quota = tenant.quotas.find((one) => one.quota === name);
      cell.show(quota?.used ?? null, quota?.limit ?? null);
    }
  }
}

class QuotaCell {
  constructor() {
    this.text = h("span");
    this.bar = new ShareBar(["quota"]);
    this.element = h("td", { class: "quota-cell" }, this.text, this.bar.element);
  }

  /** @param {number | null} used @param {number | null} limit */
  show(used, limit) {
    const share = used === null || !limit ? null : used / limit;
    const isNearlyFull = share !== null && share >= NEARLY_FULL;
    const shown = limit === null ? `${count(used)}, no limit` : `${count(used)} of ${count(limit)} (${percent(share)})`;
    setText(this.text, isNearlyFull ? `⚠ ${shown}` : shown);
    setAttribute(this.element, "class", isNearlyFull ? "quota-cell full" : "quota-cell");
    this.bar.element.hidden = limit === null;
    this.bar.show([share], 1);
  }
}
