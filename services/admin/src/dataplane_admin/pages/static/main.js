// Comfort on top of pages that can be read without it.
import { follow } from "./live.js";
import { rove } from "./rove.js";
import { swapOnClick } from "./swap.js";
import { switchTheme } from "./theme.js";
import { zoom } from "./zoom.js";

switchTheme();
rove();
zoom();
swapOnClick();
follow();
