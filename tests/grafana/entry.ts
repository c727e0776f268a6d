import type { Dashboard, Panel } from "./node_modules/@grafana/schema/dist/types/raw/dashboard/x/types.gen";
import type * as timeseries from "./node_modules/@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/types.gen";
import type * as stat from "./node_modules/@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/types.gen";
import type * as gauge from "./node_modules/@grafana/schema/dist/types/raw/composable/gauge/panelcfg/x/types.gen";
import type * as bargauge from "./node_modules/@grafana/schema/dist/types/raw/composable/bargauge/panelcfg/x/types.gen";
import type * as table from "./node_modules/@grafana/schema/dist/types/raw/composable/table/panelcfg/x/types.gen";
import type * as heatmap from "./node_modules/@grafana/schema/dist/types/raw/composable/heatmap/panelcfg/x/types.gen";
import type * as statetimeline from "./node_modules/@grafana/schema/dist/types/raw/composable/statetimeline/panelcfg/x/types.gen";
import type * as statushistory from "./node_modules/@grafana/schema/dist/types/raw/composable/statushistory/panelcfg/x/types.gen";
export interface Root {
  dashboard: Dashboard;
  panel: Panel;
  "timeseries options": timeseries.Options;
  "timeseries custom": timeseries.FieldConfig;
  "stat options": stat.Options;
  "gauge options": gauge.Options;
  "bargauge options": bargauge.Options;
  "table options": table.Options;
  "table custom": table.FieldConfig;
  "heatmap options": heatmap.Options;
  "heatmap custom": heatmap.FieldConfig;
  "state-timeline options": statetimeline.Options;
  "state-timeline custom": statetimeline.FieldConfig;
  "status-history options": statushistory.Options;
  "status-history custom": statushistory.FieldConfig;
}
