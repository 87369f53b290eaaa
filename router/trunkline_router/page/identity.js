/** The API key of the person at this page. It stays in this tab's session, and is sent only in the header Authorization. */

const STORED = "trunkline.api-key";

export class Identity {
  /** @param {Storage} storage  sessionStorage: it ends with the tab */
  constructor(storage) {
    this.storage = storage;
  }

  /** The key; "" if there is none. */
  get key() {
    return this.storage.getItem(STORED) ?? "";
  }

  /** @param {string} key */
  keep(key) {
    this.storage.setItem(STORED, key);
  }

  forget() {
    this.storage.removeItem(STORED);
  }

  /** @returns {Record<string, string>} the headers that present the key */
  get headers() {
    return this.key === "" ? {} : { authorization: `Bearer ${this.key}` };
  }
}
