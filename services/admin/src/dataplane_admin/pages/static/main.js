// Enhances the pages, which also work without scripts.
import { follow } from "./live.js";
import { copyOnClick } from "./copy.js";
import { moveByArrows } from "./arrows.js";
import { drawCurves } from "./curves.js";
import { focusScrollable, listenToKeys } from "./keys.js";
import { preparePalette } from "./palette.js";
import { holdHeight } from "./raised.js";
import { swapOnClick } from "./swap.js";
import { downloadTables } from "./tables.js";
import { switchTheme } from "./theme.js";
import { chooseZone } from "./zone.js";
import { zoom } from "./zoom.js";

document.documentElement.classList.add("scripted");
switchTheme();
chooseZone();
preparePalette();
listenToKeys();
focusScrollable();
copyOnClick();
downloadTables();
moveByArrows();
zoom();
drawCurves();
holdHeight();
swapOnClick();
follow();
