// Before a group is seen: signing in, choosing a group, and when neither can be done.
import { S } from "./store.js";
import { parts } from "./parts.js";

export const SignIn = {
  components: parts,
  props: { group: String, problem: String },
  computed: {
    next: () => location.pathname + location.search + location.hash,
    S: () => S,
  },
  template: `
<section class="panel door"><icon name="mark" :size="28" class="t-work"></icon><h1>Studio</h1>
<p v-if="problem" class="problem" role="alert">{{ problem }}</p>
<p>A key of <b><bdi>{{ group }}</bdi></b> with the role observe or admin is needed.</p>
<form method="post" :action="S.prefix + '/sign-in'"><input type="hidden" name="group" :value="group"><input type="hidden" name="next" :value="next"><label>Key<input type="password" name="key" autocomplete="current-password" autofocus required placeholder="fd_…"></label><button class="main" type="submit">Sign in</button></form>
<p class="dim">Made with <code>dispatch keys create --name NAME --role observe --group {{ group }}</code></p></section>`,
};

export const Groups = {
  components: parts,
  props: { groups: Array },
  computed: { S: () => S },
  template: `<section class="panel door"><h1>Fabric groups</h1><ul class="plain"><li v-for="name in groups" :key="name"><a :href="S.prefix + '/g/' + encodeURIComponent(name)"><bdi>{{ name }}</bdi></a></li></ul></section>`,
};

export const Away = {
  props: { problem: String },
  mounted() {
    this.again = setTimeout(() => location.reload(), 3000);
  },
  unmounted() {
    clearTimeout(this.again);
  },
  template: `<section class="panel door"><h1>Studio</h1><p class="problem" role="alert">{{ problem }}</p><p>Trying again…</p></section>`,
};
