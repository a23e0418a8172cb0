// Editing the config: one pool, one endpoint, the group, or going back to an earlier generation. What would change is
// shown before it is sent; when somebody else was faster, both changes are shown and one of them is chosen.
import { S, ask, canAct } from "./store.js";
import { FIELDS, ID_OF, read } from "./fields.js";
import { parts } from "./parts.js";
import { A, confirmed } from "./acts.js";
import { count, percent } from "./format.js";

export const Editor = {
  components: parts,
  data: () => ({
    d: A.dialog, doc: null, generation: 0, by: null, values: {}, adding: false, newId: "", reason: "", problems: {}, said: "", checked: null, conflict: null, busy: false, problem: "",
  }),
  computed: {
    canAct: () => canAct.value,
    rollback() {
      return this.d.list === "rollback";
    },
    fields() {
      return this.rollback ? [] : FIELDS[this.d.list];
    },
    item() {
      if (!this.doc || this.rollback) return {};
      if (this.d.list === "group") return this.doc;
      return (this.doc[this.d.list] || []).find((each) => each[ID_OF[this.d.list]] === this.d.id) || {};
    },
    title() {
      if (this.rollback) return `Go back to generation ${this.d.generation}`;
      if (this.adding) return `New ${this.d.list === "pools" ? "pool" : "endpoint"}`;
      if (this.d.list === "group") return `Edit ${S.group}`;
      return `Edit ${this.d.id}`;
    },
    endpoints() {
      return (this.doc?.endpoints || []).map((each) => each.endpoint_id);
    },
    // Paths and values of what differs from the document.
    edits() {
      if (this.rollback) return [];
      const id = this.adding ? this.newId.trim() : this.d.id;
      const before = this.d.list === "group" ? "" : `${this.d.list}.${id}.`;
      const found = [];
      for (const field of this.fields) {
        const { value, problem } = read(field, this.values[field.name]);
        const was = this.item[field.name] ?? (field.kind === "flag" ? false : field.kind === "optional" ? null : "");
        if (problem || value === was) continue;
        if (this.adding && (value === "" || value === null)) continue;
        found.push([before + field.name, value]);
      }
      return found;
    },
    wrong() {
      const found = {};
      for (const field of this.fields) {
        if (this.adding && String(this.values[field.name] ?? "") === "") continue;
        const { problem } = read(field, this.values[field.name]);
        if (problem) found[field.name] = problem;
      }
      return found;
    },
    ready() {
      if (this.busy || !this.canAct || !this.reason.trim() || this.conflict) return false;
      return this.checked?.status === "VALID" && !Object.keys(this.wrong).length;
    },
    // Fair shares by weight alone, of pools that have work: before and after.
    shares() {
      if (this.d.list !== "pools" || this.adding) return null;
      const weight = read(FIELDS.pools[0], this.values.quantum).value;
      const was = this.item.quantum;
      if (!weight || weight === was) return null;
      const others = Object.entries(S.pools).filter(([id, pool]) => id !== this.d.id && (pool.waiting || pool.in_flight) && !pool.stopped);
      const sum = others.reduce((total, [, pool]) => total + (pool.weight || 0), 0);
      return [percent(was / (sum + was)), percent(weight / (sum + weight))];
    },
    lowered() {
      if (this.d.list !== "pools") return "";
      const cap = read(FIELDS.pools[2], this.values.max_concurrent).value;
      const runs = S.pools[this.d.id]?.in_flight || 0;
      return cap && cap < runs ? `${count(runs)} running requests stay; none starts until ${count(cap - 1)} are left.` : "";
    },
  },
  watch: {
    edits: {
      deep: true,
      handler() {
        clearTimeout(this.later);
        this.later = setTimeout(() => this.check(), 250);
      },
    },
  },
  async created() {
    this.adding = this.d.id === "" && this.d.list !== "group" && !this.rollback;
    await this.load();
    if (this.rollback) await this.check();
  },
  unmounted() {
    clearTimeout(this.later);
  },
  methods: {
    count,
    async load() {
      try {
        const found = await ask("config");
        this.doc = found.document;
        this.generation = found.generation;
      } catch (error) {
        this.problem = error.message;
        return;
      }
      const values = {};
      for (const field of this.fields) values[field.name] = this.item[field.name] ?? (field.kind === "flag" ? this.adding : "");
      this.values = values;
    },
    // How the library names this field when something is wrong with it: by its place in the list.
    key(field) {
      if (this.d.list === "group") return field.name;
      const items = this.doc?.[this.d.list] || [];
      const at = items.findIndex((each) => each[ID_OF[this.d.list]] === this.d.id);
      return `${this.d.list}[${at < 0 ? items.length : at}].${field.name}`;
    },
    async check() {
      this.problems = {};
      this.problem = "";
      if (!this.rollback && (!this.edits.length || Object.keys(this.wrong).length)) {
        this.checked = null;
        return;
      }
      const asked = ++this.asked || (this.asked = 1);
      try {
        const told = this.rollback
          ? await ask("check_rollback", { generation: this.d.generation, expected: this.generation })
          : await ask("check", { edits: this.edits, expected: this.generation });
        if (asked === this.asked) await this.take(told);
      } catch (error) {
        this.problem = error.message;
      }
    },
    async take(told) {
      this.checked = told;
      if (told.status === "INVALID") {
        this.problems = Object.fromEntries(told.problems.map(([field, value, message]) => [field, `${value} is not allowed; ${message}`]));
        const shown = new Set(this.fields.map((field) => this.key(field)));
        this.problem = told.problems.filter(([field]) => !shown.has(field)).map(([field, value, message]) => `${field} is ${value}: ${message}`).join("; ");
      }
      if (told.status === "CONFLICT") await this.conflicted(told);
    },
    async conflicted(told) {
      let theirs = [];
      try {
        theirs = (await ask("generation", { generation: told.generation })).changes;
      } catch {
        // the generation may be gone by now; who and when is still known
      }
      this.conflict = { ...told, theirs, mine: this.edits };
    },
    async mineOnTop() {
      const mine = Object.fromEntries(Object.entries(this.values));
      const touched = new Set(this.edits.map(([path]) => path.split(".").pop()));
      this.conflict = null;
      await this.load();
      for (const name of touched) this.values[name] = mine[name];
      await this.check();
    },
    async send() {
      this.busy = true;
      this.problem = "";
      try {
        const args = { reason: this.reason, expected: this.generation };
        const told = this.rollback ? await ask("roll_back", { ...args, generation: this.d.generation }) : await ask("apply", { ...args, edits: this.edits });
        if (told.status === "APPLIED") {
          const from = this.generation;
          A.dialog = null;
          await confirmed(() => (S.one.group?.generation || 0) >= told.generation, `Done, generation ${told.generation}.`, { undo: from });
        } else await this.take(told);
      } catch (error) {
        this.problem = error.message;
      }
      this.busy = false;
    },
  },
  template: `
<form method="dialog" class="editor" @submit.prevent="ready && send()">
  <header><h2>{{ title }}</h2><span class="note" v-if="generation">of generation {{ generation }}</span></header>
  <p v-if="!doc && !problem" class="dim">Reading the config…</p>
  <template v-if="doc">
    <label v-if="adding">Name<input v-model="newId" name="new-id" autocomplete="off" spellcheck="false" maxlength="128"><span class="hint">letters, digits, . _ -</span></label>
    <div class="fields">
      <label v-for="field in fields" :key="field.name" :class="{ bad: wrong[field.name] || problems[key(field)], check: field.kind === 'flag' }">
        <span class="label">{{ field.label }}</span>
        <select v-if="field.kind === 'word' || field.kind === 'endpoint'" v-model="values[field.name]" :name="field.name"><option v-if="adding" value="">default</option><option v-for="one in (field.kind === 'endpoint' ? endpoints : field.words)" :key="one" :value="one">{{ one }}</option></select>
        <input v-else-if="field.kind === 'flag'" type="checkbox" v-model="values[field.name]" :name="field.name">
        <input v-else v-model="values[field.name]" :name="field.name" :inputmode="field.kind === 'text' ? 'text' : 'numeric'" autocomplete="off" :placeholder="field.kind === 'optional' ? 'no bound' : ''" :aria-describedby="'h-' + field.name">
        <span class="hint" :id="'h-' + field.name"><template v-if="wrong[field.name]">{{ wrong[field.name] }}</template><template v-else-if="problems[key(field)]">{{ problems[key(field)] }}</template><template v-else>{{ field.hint }}</template></span>
      </label>
    </div>
    <p v-if="shares" class="said-inline">Fair share among pools with work: {{ shares[0] }} → <b>{{ shares[1] }}</b></p>
    <p v-if="lowered" class="said-inline">{{ lowered }}</p>
    <section class="diff" aria-label="What would change" v-if="checked && checked.status === 'VALID' && !conflict">
      <h3>{{ checked.changed }} {{ checked.changed === 1 ? 'change' : 'changes' }}</h3>
      <div v-for="[field, before, after] in checked.changes" :key="field" class="change"><code>{{ field }}</code><span><del>{{ before }}</del> → <ins>{{ after }}</ins></span></div>
    </section>
    <p v-if="checked && checked.status === 'UNCHANGED'" class="dim">It is like that already.</p>
    <section v-if="conflict" class="conflict" role="alert">
      <p><b>{{ conflict.generation }}</b> is in force: somebody changed the config while you edited: <b>{{ conflict.actor || 'somebody' }}</b>, <age :at="conflict.changed_ms"></age> ago.</p>
      <h3>Theirs</h3><div v-for="[field, before, after] in conflict.theirs" :key="field" class="change"><code>{{ field }}</code><span><del>{{ before }}</del> → <ins>{{ after }}</ins></span></div>
      <template v-if="conflict.mine.length"><h3>Yours</h3><div v-for="[path, value] in conflict.mine" :key="path" class="change"><code>{{ path }}</code><span><ins>{{ value === null ? 'none' : value }}</ins></span></div></template>
      <div class="buttons"><button type="button" @click="$emit('close')">Discard</button><button type="button" class="main" @click="mineOnTop">Apply mine to {{ conflict.generation }}</button></div>
    </section>
    <template v-else>
      <label>Reason<input v-model="reason" name="reason" autocomplete="off" maxlength="200"></label>
      <p v-if="problem" class="problem" role="alert">{{ problem }}</p>
      <div class="buttons"><button type="button" @click="$emit('close')">Discard</button><button type="submit" class="main" :disabled="!ready">{{ rollback ? 'Go back' : 'Apply' }}</button></div>
    </template>
  </template>
  <p v-else-if="problem" class="problem" role="alert">{{ problem }}</p>
</form>`,
};
