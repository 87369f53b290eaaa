/** The hottest prefixes as a tree: a prefix that begins with another one is below it. */

import { h, KeyedList, setAttribute, setText } from "./dom.js";
import { count, decimal, duration } from "./format.js";
import { ShareBar } from "./share_bar.js";

/** @typedef {import("./fleet_view").PrefixNode} PrefixNode */
/** @typedef {{tenant: string, node: PrefixNode, key: string, depth: number, isOpen: boolean}} TreeRow */

const OPEN_DEPTH = 2;

export class PrefixesPanel {
  /** @param {{section: any, rows: Element, none: any}} elements */
  constructor({ section, rows, none }) {
    this.section = section;
    this.none = none;
    /** @type {Map<string, boolean>} prefixes that were opened or closed by hand */
    this.chosen = new Map();
    this.most = 1;
    this.list = new KeyedList(
      rows,
      (/** @type {TreeRow} */ row) => row.key,
      () => new PrefixRow((key, isOpen) => this.#toggle(key, isOpen)),
      (shown, row) => shown.show(row, this.most),
    );
  }

  /** @param {import("./fleet_view").FleetView["prefixes"]} prefixes */
  show(prefixes) {
    this.prefixes = prefixes;
    this.section.hidden = prefixes === null;
    const rows = (prefixes?.by_tenant ?? []).flatMap(({ tenant, roots }) => this.#rowsOf(tenant, roots, 0));
    this.most = Math.max(1, ...rows.map(({ node }) => node.hits));
    this.list.show(rows);
    this.none.hidden = rows.length > 0;
  }

  /** @param {string} tenant @param {PrefixNode[]} nodes @param {number} depth @returns {TreeRow[]} */
  #rowsOf(tenant, nodes, depth) {
    return [...nodes]
      .sort((one, other) => other.hits - one.hits)
      .flatMap((node) => {
        const key = `${tenant} ${node.id}`;
        const isOpen = this.chosen.get(key) ?? depth < OPEN_DEPTH;
        const below = isOpen ? this.#rowsOf(tenant, node.children, depth + 1) : [];
        return [{ tenant, node, key, depth, isOpen }, ...below];
      });
  }

  /** @param {string} key @param {boolean} isOpen */
  #toggle(key, isOpen) {
    this.chosen.set(key, isOpen);
    this.show(this.prefixes ?? null);
  }
}

class PrefixRow {
  /** @param {(key: string, isOpen: boolean) => void} toggle */
  constructor(toggle) {
    /** @type {TreeRow | null} */
    this.row = null;
    this.mark = h("span", { "aria-hidden": "true" });
    this.button = h(
      "button",
      { type: "button", class: "twig", onclick: () => this.row && toggle(this.row.key, !this.row.isOpen) },
      this.mark,
    );
    this.leaf = h("span", { class: "twig", "aria-hidden": "true" }, "·");
    this.name = h("span", { class: "mono" });
    this.tenant = h("td");
    this.size = h("td", { class: "number" });
    this.hits = h("span");
    this.bar = new ShareBar(["hits"]);
    this.age = h("td", { class: "number" });
    this.holders = h("td", { class: "mono" });
    this.place = h("div", { class: "branch" }, this.button, this.leaf, this.name);
    this.element = h(
      "tr",
      {},
      h("th", { scope: "row" }, this.place),
      this.tenant,
      this.size,
      h("td", { class: "number hits-cell" }, this.hits, this.bar.element),
      this.age,
      this.holders,
    );
  }

  /** @param {TreeRow} row @param {number} most */
  show(row, most) {
    this.row = row;
    const { node, tenant, depth, isOpen } = row;
    const below = node.children.length;
    this.place.style.paddingLeft = `${depth * 1.25}rem`;
    this.button.hidden = below === 0;
    this.leaf.hidden = below > 0;
    setText(this.mark, isOpen ? "▾" : "▸");
    setAttribute(this.button, "aria-expanded", String(isOpen));
    setAttribute(this.button, "aria-label", `${below} longer prefixes of ${node.id.slice(0, 8)}`);
    setText(this.name, node.id.slice(0, 8));
    setAttribute(this.name, "title", node.id);
    setText(this.tenant, tenant || "none");
    setText(this.size, depth > 0 ? `${count(node.tokens)} (+${count(node.own_tokens)})` : count(node.tokens));
    setText(this.hits, decimal(node.hits));
    this.bar.show([node.hits], most);
    setText(this.age, `${duration(node.age_s)} ago`);
    setText(this.holders, node.holders.length > 0 ? node.holders.join(", ") : "no worker now");
  }
}
