// What finished: over time, by how it ended, how long it waited and ran.
import { ask } from "./store.js";
import { parts } from "./parts.js";

export const History = {
  components: parts,
  data: () => ({ problem: "", off: false }),
  async created() {
    try {
      await ask("history", {});
    } catch (error) {
      this.off = true;
      this.problem = error.message;
    }
  },
  template: `<header class="page-head"><h1 tabindex="-1">History</h1></header><section class="panel empty-page"><p>{{ problem || 'Reading…' }}</p></section>`,
};
