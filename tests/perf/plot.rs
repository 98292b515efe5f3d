//! One picture: a bar for each contender, ours cut into its phases.

use std::path::Path;

use plotters::prelude::*;

use crate::{contender, measure::Measured, report::ms};

const SIZE: (u32, u32) = (1000, 420);
/// From the host's side (blue) over the machine (green) to the container and back (orange, grey).
const COLOURS: [RGBColor; 9] = [
    RGBColor(158, 188, 218),
    RGBColor(107, 149, 200),
    RGBColor(63, 108, 175),
    RGBColor(116, 184, 142),
    RGBColor(44, 130, 86),
    RGBColor(245, 190, 110),
    RGBColor(232, 150, 60),
    RGBColor(205, 100, 40),
    RGBColor(170, 170, 170),
];
const OTHER: RGBColor = RGBColor(200, 200, 200);

/// Draws `measured` into the file.
pub fn draw(file: &Path, measured: &Measured) -> Result<(), String> {
    try_draw(file, measured).map_err(|error| format!("cannot draw {}: {error}", file.display()))
}

fn try_draw(file: &Path, measured: &Measured) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let longest = contender::ALL.iter().filter_map(|one| measured.middle(one.name)).max().unwrap_or(1);
    let phases = measured.phases();
    let rows = contender::ALL.len() as f64;
    let mut chart = ChartBuilder::on(&root)
        .caption("ctr run --rm busybox true (virtual ms)", ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(30)
        .build_cartesian_2d(0.0..ms(longest) * 1.55, 0.0..rows)?;
    chart.configure_mesh().disable_y_mesh().disable_y_axis().draw()?;
    for (row, contender) in contender::ALL.iter().enumerate() {
        let Some(total) = measured.middle(contender.name) else { continue };
        let bottom = rows - row as f64 - 0.8;
        let whole = [("".to_owned(), total)];
        let parts = phases.as_ref().filter(|_| row == 0).map_or(whole.as_slice(), |phases| &phases.lengths);
        let mut left = 0.0;
        for (index, (what, length)) in parts.iter().enumerate() {
            let colour = if row == 0 { COLOURS[index % COLOURS.len()] } else { OTHER };
            let right = left + ms(*length);
            let bar = Rectangle::new([(left, bottom), (right, bottom + 0.55)], colour.filled());
            let drawn = chart.draw_series([bar])?;
            if !what.is_empty() {
                drawn.label(what).legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
            }
            left = right;
        }
        let caption = format!("{}  {:.0} ms", contender.name, ms(total));
        chart.draw_series([Text::new(caption, (0.0, bottom + 0.72), ("sans-serif", 15))])?;
    }
    chart.configure_series_labels().position(SeriesLabelPosition::MiddleRight).border_style(BLACK).draw()?;
    root.present()?;
    Ok(())
}
