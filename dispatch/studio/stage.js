// The one element that Python places on a page; all else is modules beside this file.
export { default } from "fabric-studio/stage.js";
