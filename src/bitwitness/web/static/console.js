// What a page does beyond its text: live refresh, theme, copying. Every page says everything without it.
"use strict";
