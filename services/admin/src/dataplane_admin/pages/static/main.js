// Enhances the pages, which also work without scripts.
import { follow } from "./live.js";
import { moveByArrows } from "./arrows.js";
import { drawCurves } from "./curves.js";
import { swapOnClick } from "./swap.js";
import { switchTheme } from "./theme.js";
import { zoom } from "./zoom.js";

switchTheme();
moveByArrows();
zoom();
drawCurves();
swapOnClick();
follow();
