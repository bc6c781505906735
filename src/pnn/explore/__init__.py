"""`pnn explore`: a page in the browser to look into models. `subjects` opens them, a file per tab computes and writes what it
shows (plain functions, no gradio), `page` puts them on a page, `server` serves it."""
