/** Elements of the page. Text goes into text nodes only, so nothing that a server sends is ever read as markup. */

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | number | null | undefined | false} Child */
/** @typedef {Record<string, string | number | boolean | null | undefined | ((event: any) => void)>} Attributes */

/**
 * Makes an HTML element. Attributes that are null, undefined or false are left out; `onclick` and the like are listeners.
 * @param {string} tag
 * @param {Attributes} [attributes]
 * @param {...Child} children
 * @returns {any}
 */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/**
 * Makes an SVG element.
 * @param {string} tag
 * @param {Attributes} [attributes]
 * @param {...Child} children
 * @returns {any}
 */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** @param {Element} element @param {Attributes} attributes @param {Child[]} children */
function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  append(element, children);
  return element;
}

/** @param {Element} element @param {Child[]} children */
function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(typeof child === "number" ? String(child) : child);
  }
}

/**
 * Replaces what an element contains.
 * @param {Element} element
 * @param {...Child} children
 */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/**
 * Sets an element's text, if it is another one: a live region or a selection is not disturbed by equal text.
 * @param {Element} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Sets or removes an attribute.
 * @param {Element} element
 * @param {string} name
 * @param {string | number | null} value
 */
export function setAttribute(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/**
 * The element of index.html with an id.
 * @param {string} id
 * @returns {any}
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`index.html has no element #${id}`);
  return found;
}

/**
 * Shows a list of items as children that live as long as their items: focus, hover and open parts survive an update.
 * @template Item, Shown
 */
export class KeyedList {
  /**
   * @param {Element} parent
   * @param {(item: Item) => string} keyOf
   * @param {(item: Item) => Shown & {element: Element}} create
   * @param {(shown: Shown & {element: Element}, item: Item) => void} update
   */
  constructor(parent, keyOf, create, update) {
    this.parent = parent;
    this.keyOf = keyOf;
    this.create = create;
    this.update = update;
    /** @type {Map<string, Shown & {element: Element}>} */
    this.shown = new Map();
  }

  /** @param {Item[]} items */
  show(items) {
    const gone = new Set(this.shown.keys());
    /** @type {Element | null} */
    let before = null;
    for (const item of items) {
      const key = this.keyOf(item);
      gone.delete(key);
      const shown = this.shown.get(key) ?? this.create(item);
      this.shown.set(key, shown);
      this.update(shown, item);
      /** @type {Element | null} */
      const place = before === null ? this.parent.firstElementChild : before.nextElementSibling;
      // An element that moves loses focus, so that only those in another place move.
      if (place !== shown.element) this.parent.insertBefore(shown.element, place);
      before = shown.element;
    }
    for (const key of gone) {
      this.shown.get(key)?.element.remove();
      this.shown.delete(key);
    }
  }
}
