// What a person does: the menu of a pool, and the dialogs with reason and confirmation. Nothing is shown as done before
// a snapshot says so.
import { reactive } from "vue";
import { S, ask, canAct, whyNotAct } from "./store.js";
import { href } from "./router.js";
import { parts } from "./parts.js";
import { Editor } from "./editor.js";
import { count, plural, duration } from "./format.js";

export const A = reactive({ menu: null, dialog: null, said: null });

export function openMenu(event, pool) {
  const box = event.currentTarget.getBoundingClientRect?.() || { right: event.clientX, bottom: event.clientY };
  const at = event.type === "contextmenu" ? { x: event.clientX, y: event.clientY } : { x: box.right, y: box.bottom };
  A.menu = { ...at, pool, back: event.currentTarget };
}

export function openDialog(kind, facts = {}) {
  A.menu = null;
  A.dialog = { kind, ...facts };
}

let fading;
export function say(text, { undo = null, tone = "work" } = {}) {
  A.said = { text, undo, tone };
  clearTimeout(fading);
  fading = setTimeout(() => (A.said = null), 15000);
}

// Wait until a snapshot shows what was asked for; after 5 s say that it is not known.
export async function confirmed(holds, done, options) {
  say("Sent.");
  const ends = Date.now() + 5000;
  while (Date.now() < ends) {
    if (holds()) return say(done, options);
    await new Promise((later) => setTimeout(later, 100));
  }
  return say("Not confirmed yet. It may have been applied; check Changes.", { tone: "hold" });
}

const STATES = { pause: "paused", resume: "active", drain: "draining" };

const Stop = {
  components: parts,
  data: () => ({ d: A.dialog, reason: "", typed: "", problem: "", busy: false }),
  computed: {
    p() {
      return S.pools[this.d.pool] || {};
    },
    verb() {
      return { pause: "Pause", resume: "Resume", drain: "Drain" }[this.d.action];
    },
    ready() {
      if (this.busy || !canAct.value) return false;
      if (this.d.action === "drain" && this.typed !== this.d.pool) return false;
      return this.d.action === "resume" || this.reason.trim() !== "";
    },
  },
  methods: {
    count,
    plural,
    async send() {
      this.busy = true;
      this.problem = "";
      const { pool, action } = this.d;
      try {
        await ask("stop_pool", { pool, action, reason: this.reason });
        A.dialog = null;
        const done = { pause: `${pool} is paused.`, resume: `${pool} is active again.`, drain: `${pool} drains.` }[action];
        await confirmed(() => (S.pools[pool]?.stopped?.state || "active") === STATES[action], done);
      } catch (error) {
        this.problem = error.message;
      }
      this.busy = false;
    },
  },
  template: `
<form method="dialog" @submit.prevent="ready && send()">
  <h2>{{ verb }} <name :text="d.pool" :most="40"></name>?</h2>
  <p v-if="d.action === 'pause'">{{ count(p.waiting) }} {{ plural(p.waiting, 'request waits', 'requests wait') }} in it; nothing is launched until it is resumed. New requests are taken, and callers keep waiting until their deadline. The {{ count(p.in_flight) }} that run go on.</p>
  <p v-else-if="d.action === 'drain'">New requests are refused. The {{ count(p.waiting) }} that wait are launched as usual, the {{ count(p.in_flight) }} that run go on.</p>
  <p v-else>It is {{ p.stopped ? p.stopped.state : 'active' }}<template v-if="p.stopped"> by {{ p.stopped.by || 'somebody' }}<template v-if="p.stopped.reason">: “{{ p.stopped.reason }}”</template></template>. {{ count(p.waiting) }} {{ plural(p.waiting, 'request waits', 'requests wait') }} in it.</p>
  <label v-if="d.action === 'drain'">Type the pool's name to go on<input v-model="typed" autocomplete="off" spellcheck="false" name="typed"></label>
  <label>Reason<span v-if="d.action === 'resume'" class="dim"> (optional)</span><input v-model="reason" autocomplete="off" maxlength="200" name="reason" autofocus></label>
  <p v-if="problem" class="problem" role="alert">{{ problem }}</p>
  <div class="buttons"><button type="button" @click="$emit('close')">Leave it</button><button type="submit" class="main" :disabled="!ready">{{ verb }}</button></div>
</form>`,
};

const Cancel = {
  components: parts,
  data: () => ({ d: A.dialog, reason: "", problem: "", busy: false }),
  methods: {
    async send() {
      this.busy = true;
      try {
        const told = await ask("cancel", { id: this.d.id, reason: this.reason });
        A.dialog = null;
        say({
          CANCELLED: "Cancelled: it was waiting.",
          CANCELLING: "Asked to stop; the backend may still finish.",
          ENDED: `It had ended before: ${told.ending}.`,
          UNKNOWN: "It is not there any more.",
        }[told.status] || told.status);
        this.d.done?.();
      } catch (error) {
        this.problem = error.message;
      }
      this.busy = false;
    },
  },
  template: `
<form method="dialog" @submit.prevent="send">
  <h2>Cancel this request?</h2>
  <dl class="facts"><dt>Request</dt><dd><code>{{ d.id }}</code></dd><dt>Pool</dt><dd><name :text="d.pool"></name></dd><dt>Age</dt><dd><age :at="d.submitted_ms"></age></dd><dt>Producer</dt><dd><name :text="d.producer"></name></dd></dl>
  <p v-if="d.running">It runs: its gateway is asked to stop it; the backend may still finish.</p><p v-else>It waits: it is removed from the queue, and its caller is told.</p>
  <label>Reason<span class="dim"> (optional)</span><input v-model="reason" autocomplete="off" maxlength="200" name="reason" autofocus></label>
  <p v-if="problem" class="problem" role="alert">{{ problem }}</p>
  <div class="buttons"><button type="button" @click="$emit('close')">Leave it</button><button type="submit" class="main" :disabled="busy">Cancel request</button></div>
</form>`,
};

const CancelMany = {
  components: parts,
  data: () => ({ d: A.dialog, reason: "", typed: "", problem: "", busy: false, n: 0 }),
  computed: {
    most() {
      return Math.min(this.n, 1000);
    },
    ready() {
      return this.typed.replace(/\D/g, "") === String(this.most) && this.reason.trim() && !this.busy && this.n > 0;
    },
  },
  created() {
    this.n = S.pools[this.d.pool]?.waiting || 0;
  },
  methods: {
    count,
    plural,
    async send() {
      this.busy = true;
      this.problem = "";
      try {
        const told = await ask("cancel_waiting", { pool: this.d.pool, count: this.n, reason: this.reason });
        A.dialog = null;
        say(`${count(told.cancelled)} of ${count(told.waited)} waiting requests were cancelled.`);
      } catch (error) {
        this.problem = error.message;
        this.n = S.pools[this.d.pool]?.waiting || 0;
      }
      this.busy = false;
    },
  },
  template: `
<form method="dialog" @submit.prevent="ready && send()">
  <h2>Cancel what waits in <name :text="d.pool" :most="40"></name>?</h2>
  <p>{{ count(n) }} {{ plural(n, 'request waits', 'requests wait') }}. The first {{ count(most) }} end as cancelled and their callers are told; what runs goes on. If the number differs by more than 10 % when it is done, nothing is.</p>
  <label>Type {{ most }} to go on<input v-model="typed" autocomplete="off" inputmode="numeric" name="typed"></label>
  <label>Reason<input v-model="reason" autocomplete="off" maxlength="200" name="reason"></label>
  <p v-if="problem" class="problem" role="alert">{{ problem }}</p>
  <div class="buttons"><button type="button" @click="$emit('close')">Leave them</button><button type="submit" class="main" :disabled="!ready">Cancel {{ count(most) }}</button></div>
</form>`,
};

const Keys = {
  data: () => ({
    rows: [["/", "find a pool, gateway, endpoint or request id"], ["f", "filter"], ["g then o p i h e g c", "go to a page"], ["j k", "next, previous row"], ["Enter", "open the row"], ["Esc", "close"], [".", "acts of the row"], ["e", "edit the row's pool"], ["p", "pause or resume the row's pool"], ["z", "freeze the page"], ["t", "light or dark"], ["?", "this list"]],
    on: localStorage.getItem("fd-keys") !== "off",
  }),
  methods: {
    turn() {
      localStorage.setItem("fd-keys", this.on ? "on" : "off");
    },
  },
  template: `<form method="dialog"><h2>Keys</h2><dl class="facts"><template v-for="[key, what] in rows" :key="key"><dt><kbd>{{ key }}</kbd></dt><dd>{{ what }}</dd></template></dl><label class="check"><input type="checkbox" v-model="on" @change="turn"> Single keys are on</label><div class="buttons"><button type="button" class="main" @click="$emit('close')">Close</button></div></form>`,
};

const DIALOGS = { stop: Stop, cancel: Cancel, cancelMany: CancelMany, edit: Editor, keys: Keys };

export const ActsHost = {
  components: { ...parts, ...DIALOGS },
  setup: () => ({ A, S, canAct, whyNotAct }),
  computed: {
    form: () => A.dialog && DIALOGS[A.dialog.kind],
    items() {
      const id = A.menu?.pool;
      const pool = S.pools[id];
      if (!pool) return [];
      const stop = (action) => () => openDialog("stop", { pool: id, action });
      const state = pool.stopped?.state || "active";
      return [
        { label: "Open", href: href("pools", id) },
        { label: "Waiting requests", href: href("pools", id) + "#waiting" },
        ...(state === "active" ? [{ label: "Pause…", run: stop("pause") }, { label: "Drain…", run: stop("drain"), wide: true }] : [{ label: "Resume…", run: stop("resume") }]),
        { label: "Edit weight and caps…", run: () => openDialog("edit", { list: "pools", id }) },
        { label: "Cancel what waits…", run: () => openDialog("cancelMany", { pool: id }), wide: true, off: !pool.waiting },
      ];
    },
  },
  watch: {
    "A.dialog"(now) {
      this.$nextTick(() => {
        const dialog = this.$refs.dialog;
        if (now && dialog && !dialog.open) dialog.showModal();
      });
    },
    "A.menu"(now) {
      if (now) this.$nextTick(() => this.$refs.menu?.querySelector("a, button:not(:disabled)")?.focus());
    },
  },
  methods: {
    close() {
      A.dialog = null;
    },
    shut() {
      const back = A.menu?.back;
      A.menu = null;
      back?.focus?.();
    },
    move(event) {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") {
        event.stopPropagation();
        return this.shut();
      }
      if (!step) return undefined;
      event.preventDefault();
      const items = [...this.$refs.menu.querySelectorAll("a, button:not(:disabled)")];
      items[(items.indexOf(document.activeElement) + step + items.length) % items.length].focus();
      return undefined;
    },
    undo(generation) {
      A.said = null;
      openDialog("edit", { list: "rollback", generation });
    },
    duration,
  },
  template: `
<div v-if="A.menu && items.length" class="shade" @click="shut" @contextmenu.prevent="shut"></div>
<ul v-if="A.menu && items.length" ref="menu" class="menu" role="menu" :style="{ left: A.menu.x + 'px', top: A.menu.y + 'px' }" @keydown="move">
  <li v-for="item in items" :key="item.label" role="none" :class="{ wide: item.wide }"><a v-if="item.href" role="menuitem" :href="item.href" @click="shut">{{ item.label }}</a><button v-else role="menuitem" :disabled="!canAct || item.off" :title="canAct ? null : whyNotAct()" @click="item.run">{{ item.label }}</button></li>
  <li v-if="!S.me.writes" role="none" class="note">{{ S.me.why }}</li>
</ul>
<dialog v-if="A.dialog" ref="dialog" :class="'d-' + A.dialog.kind" @close="close" @click.self="close" aria-label="Act"><component :is="form" @close="close"></component></dialog>
<div class="said" role="status" aria-live="polite"><template v-if="A.said"><span :class="'t-' + A.said.tone">{{ A.said.text }}</span><button v-if="A.said.undo" class="quiet link" @click="undo(A.said.undo)">Undo…</button><button class="quiet icon" aria-label="Dismiss" @click="A.said = null"><icon name="cross" :size="12"></icon></button></template></div>`,
};
