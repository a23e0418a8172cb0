// What was asked for: on its way, not to be had, nothing, or there.
export const Asked = {
  props: { problem: String, known: null, rows: Array, empty: String },
  template: `<p v-if="problem && !known" class="problem" role="alert">{{ problem }}</p><p v-else-if="!known" class="empty">Reading…</p><p v-else-if="!rows.length" class="empty">{{ empty }}</p><slot v-else></slot>`,
};
