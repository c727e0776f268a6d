"""Rows of GPUs, read from NVML, DCGM and the kernel log."""

from flopwatch.catalogue.row import GPU, counter, gauge, info, sparse

# fmt: off
# Identity and state.
GPU_INFO = info("gpu_info", "Identity of one GPU. source is nvml, amd-smi, or simulated on a simulated host.", (*GPU,
    "host", "model", "pci_bus_id", "serial", "board_part_number", "module_id", "numa_node", "driver_version",
    "vbios_version", "inforom_version", "source"),
    "nvmlDeviceGetName, GetUUID, GetPciInfo_v3, GetSerial, GetBoardPartNumber, GetModuleId, GetVbiosVersion, "
    "GetInforomImageVersion, nvmlSystemGetDriverVersion; /sys/bus/pci numa_node", key=True)
GPU_PRESENT = gauge("gpu_present", "1 if the GPU answers, 0 if it is in this host's inventory but does not answer.",
    GPU, "nvmlDeviceGetHandleByIndex_v2 against the persisted inventory", key=True)
GPU_READABLE = gauge("gpu_readable", "1 if this exporter can read the GPU, 0 if not: no device file, no permission, no "
    "library, or no GPU answers. With 0, the GPU itself may be healthy, so gpu_present is absent.", GPU,
    "nvmlReturn_t of the calls about the GPU, /dev/nvidiaN, /proc/driver/nvidia")
GPU_DRIVER_LOADED = gauge("gpu_driver_loaded", "1 if the NVIDIA driver answers, 0 if none is loaded on a host that has "
    "GPUs in its inventory.", (), "nvmlReturn_t of nvmlInit, /proc/driver/nvidia/version")
GPU_RECOVERY_ACTION_ID = gauge("gpu_recovery_action_id",
    "Action the driver asks for: 0 nothing, 1 reset the GPU, 2 reboot the host, 3 drain the peers, 4 drain and reset, "
    "5 recover IMEX, 6 reset the bus, 7 reboot the system.", GPU, "NVML field 230")
GPU_PERSISTENCE_MODE = gauge("gpu_persistence_mode", "1 if the driver stays loaded while no process uses the GPU.", GPU,
    "nvmlDeviceGetPersistenceMode")
GPU_ECC_MODE = gauge("gpu_ecc_mode", "1 if error correction of the device memory is on.", GPU,
    "nvmlDeviceGetEccMode current")
GPU_MIG_MODE = gauge("gpu_mig_mode", "1 if the GPU is partitioned (MIG).", GPU, "nvmlDeviceGetMigMode current")
GPU_CHASSIS_INFO = info("gpu_chassis_info",
    "Position of a GPU in its chassis: serial number of the chassis, slot, compute tray, host in the slot (Blackwell "
    "and later).", (*GPU, "chassis_serial", "slot", "tray", "slot_node"), "DCGM fields 572-575")
# Utilization.
GPU_UTILIZATION_RATIO = gauge("gpu_utilization_ratio",
    "Share of the driver's last sampling window (1/6 to 1 s) in which a kernel ran on the GPU. A busy GPU may be "
    "inefficient.", GPU, "nvmlDeviceGetUtilizationRates gpu", scale=0.01)
GPU_MEMORY_COPY_UTILIZATION_RATIO = gauge("gpu_memory_copy_utilization_ratio",
    "Share of the driver's last sampling window (1/6 to 1 s) in which device memory was read or written.", GPU,
    "nvmlDeviceGetUtilizationRates memory", scale=0.01)
GPU_ENCODER_UTILIZATION_RATIO = gauge("gpu_encoder_utilization_ratio", "Share of time the video encoder was busy.", GPU,
    "nvmlDeviceGetEncoderUtilization", scale=0.01)
GPU_DECODER_UTILIZATION_RATIO = gauge("gpu_decoder_utilization_ratio", "Share of time the video decoder was busy.", GPU,
    "nvmlDeviceGetDecoderUtilization", scale=0.01)
GPU_PROFILED_SECONDS_TOTAL = counter("gpu_profiled_seconds_total", "Time covered by the GPU's activity counters, such "
    "as gpu_sm_active_seconds_total. Divide their rate by the rate of this counter. Constant while a profiler holds "
    "the hardware counters.", GPU, "GPM sample interval; DCGM profiling fields")
GPU_GRAPHICS_ACTIVE_SECONDS_TOTAL = counter("gpu_graphics_active_seconds_total",
    "Time in which any unit of the graphics or compute engine was active.", GPU, "GPM metric 1, DCGM field 1001")
GPU_SM_ACTIVE_SECONDS_TOTAL = counter("gpu_sm_active_seconds_total", "Time in which a streaming multiprocessor had a "
    "resident warp, mean over the GPU's multiprocessors.", GPU, "GPM metric 2, DCGM field 1002")
GPU_SM_OCCUPANCY_SECONDS_TOTAL = counter("gpu_sm_occupancy_seconds_total", "Resident warps as a share of the maximum, "
    "integrated over time: seconds at full occupancy.", GPU, "GPM metric 3, DCGM field 1003")
GPU_TENSOR_ACTIVE_SECONDS_TOTAL = counter("gpu_tensor_active_seconds_total", "Time in which a tensor core issued "
    "instructions, mean over the GPU's tensor cores.", GPU, "GPM metric 5, DCGM field 1004")
GPU_PIPE_ACTIVE_SECONDS_TOTAL = counter("gpu_pipe_active_seconds_total", "Time in which one kind of pipe issued "
    "instructions: integer, fp64, fp32, fp16, tensor_hmma, tensor_imma, and tensor_dmma (GPM) or tensor_dfma (DCGM). "
    "Absent for pipes never used.", (*GPU, "pipe"), "GPM metrics 4, 7-9, 11-13; DCGM fields 1006-1008, 1013-1016")
GPU_DRAM_ACTIVE_SECONDS_TOTAL = counter("gpu_dram_active_seconds_total", "Share of the device memory's bandwidth in "
    "use, integrated over time: seconds at full bandwidth.", GPU, "GPM metric 10, DCGM field 1005")
GPU_PROCESSES = gauge("gpu_processes",
    "Compute processes on the GPU by owner: slurm:JOB, pod:UID, container:ID or user:UID, from the process's cgroup.",
    (*GPU, "owner"), "nvmlDeviceGetComputeRunningProcesses_v3, /proc/PID/cgroup")
GPU_PROCESS_MEMORY_BYTES = gauge("gpu_process_memory_bytes", "Device memory held by the processes of an owner, as in "
    "gpu_processes.", (*GPU, "owner"), "nvmlDeviceGetComputeRunningProcesses_v3 usedGpuMemory")
# Memory.
GPU_MEMORY_USED_BYTES = gauge("gpu_memory_used_bytes", "Device memory allocated.", GPU,
    "nvmlDeviceGetMemoryInfo v2 used")
GPU_MEMORY_TOTAL_BYTES = gauge("gpu_memory_total_bytes", "Device memory installed, including the driver's reserve.",
    GPU, "nvmlDeviceGetMemoryInfo v2 total")
GPU_MEMORY_RESERVED_BYTES = gauge("gpu_memory_reserved_bytes", "Device memory the driver keeps for itself.", GPU,
    "nvmlDeviceGetMemoryInfo v2 reserved")
GPU_BAR1_USED_BYTES = gauge("gpu_bar1_used_bytes", "Bytes of the PCIe window (BAR1) in use.", GPU,
    "nvmlDeviceGetBAR1MemoryInfo used")
GPU_BAR1_TOTAL_BYTES = gauge("gpu_bar1_total_bytes", "Size of the PCIe window (BAR1).", GPU,
    "nvmlDeviceGetBAR1MemoryInfo total")
# Temperature and power.
GPU_TEMPERATURE_CELSIUS = gauge("gpu_temperature_celsius", "Temperature of the GPU die.", GPU,
    "nvmlDeviceGetTemperatureV, nvmlDeviceGetTemperature", key=True)
GPU_MEMORY_TEMPERATURE_CELSIUS = gauge("gpu_memory_temperature_celsius",
    "Temperature of the device memory (HBM boards only).", GPU, "NVML field 82")
GPU_TEMPERATURE_MARGIN_CELSIUS = gauge("gpu_temperature_margin_celsius",
    "Degrees Celsius left until the GPU slows down. A limit acts once this is at or below its "
    "gpu_temperature_limit_margin_celsius.", GPU, "nvmlDeviceGetMarginTemperature, DCGM field 153")
GPU_TEMPERATURE_LIMIT_MARGIN_CELSIUS = gauge("gpu_temperature_limit_margin_celsius",
    "Value of gpu_temperature_margin_celsius at which a limit acts: shutdown, slowdown, memory_max, gpu_max (Ada and "
    "later).", (*GPU, "limit"), "NVML fields 193-196")
GPU_TEMPERATURE_LIMIT_CELSIUS = gauge("gpu_temperature_limit_celsius", "Temperature at which a limit acts: shutdown, "
    "slowdown, memory_max, gpu_max (before Ada).", (*GPU, "limit"), "nvmlDeviceGetTemperatureThreshold")
GPU_POWER_WATTS = gauge("gpu_power_watts", "Power drawn, mean of about one second. Prefer the rate of "
    "gpu_energy_joules_total.", GPU, "nvmlDeviceGetPowerUsage, mW", scale=1e-3)
GPU_MODULE_POWER_WATTS = gauge("gpu_module_power_watts", "Power drawn by the whole module, including its Grace CPU.",
    GPU, "NVML field 186, scope 1, mW", scale=1e-3)
GPU_POWER_LIMIT_WATTS = gauge("gpu_power_limit_watts", "Power limit in force.", GPU,
    "nvmlDeviceGetEnforcedPowerLimit, mW", scale=1e-3)
GPU_POWER_LIMIT_DEFAULT_WATTS = gauge("gpu_power_limit_default_watts", "Default power limit of the board.", GPU,
    "nvmlDeviceGetPowerManagementDefaultLimit, mW", scale=1e-3)
GPU_POWER_LIMIT_MAX_WATTS = gauge("gpu_power_limit_max_watts", "Highest power limit that can be set.", GPU,
    "nvmlDeviceGetPowerManagementLimitConstraints, mW", scale=1e-3)
GPU_ENERGY_JOULES_TOTAL = counter("gpu_energy_joules_total", "Energy drawn since the driver was loaded.", GPU,
    "NVML field 83, nvmlDeviceGetTotalEnergyConsumption, mJ", scale=1e-3, key=True)
# Clocks.
GPU_GRAPHICS_CLOCK_HERTZ = gauge("gpu_graphics_clock_hertz", "Clock of the graphics engine.", GPU,
    "nvmlDeviceGetClockInfo graphics, MHz", scale=1e6)
GPU_SM_CLOCK_HERTZ = gauge("gpu_sm_clock_hertz", "Clock of the streaming multiprocessors.", GPU,
    "nvmlDeviceGetClockInfo SM, MHz", scale=1e6)
GPU_SM_CLOCK_MAX_HERTZ = gauge("gpu_sm_clock_max_hertz", "Highest clock the streaming multiprocessors can be set to.",
    GPU, "nvmlDeviceGetMaxClockInfo SM, MHz", scale=1e6)
GPU_MEMORY_CLOCK_HERTZ = gauge("gpu_memory_clock_hertz", "Clock of the device memory.", GPU,
    "nvmlDeviceGetClockInfo memory, MHz", scale=1e6)
GPU_MEMORY_CLOCK_MAX_HERTZ = gauge("gpu_memory_clock_max_hertz", "Highest clock of the device memory.", GPU,
    "nvmlDeviceGetMaxClockInfo memory, MHz", scale=1e6)
GPU_VIDEO_CLOCK_HERTZ = gauge("gpu_video_clock_hertz", "Clock of the video engines.", GPU,
    "nvmlDeviceGetClockInfo video, MHz", scale=1e6)
GPU_VIDEO_CLOCK_MAX_HERTZ = gauge("gpu_video_clock_max_hertz", "Highest clock of the video engines.", GPU,
    "nvmlDeviceGetMaxClockInfo video, MHz", scale=1e6)
GPU_CLOCK_EVENT_ACTIVE = gauge("gpu_clock_event_active",
    "1 while the driver gives this reason for a clock below the maximum. gpu_idle is normal on an idle GPU; other "
    "reasons are absent until they first occur after the exporter's start.", (*GPU, "reason"),
    "nvmlDeviceGetCurrentClocksEventReasons, before R535 nvmlDeviceGetCurrentClocksThrottleReasons")
GPU_CLOCK_EVENT_SECONDS_TOTAL = sparse(counter("gpu_clock_event_seconds_total",
    "Time for which the GPU's clock was throttled, by reason.", (*GPU, "reason"),
    "NVML fields 74, 76, 269, 270, 271, ns; older drivers 75, 77-79", scale=1e-9, key=True))
# Memory errors and repair.
GPU_ECC_ERRORS_TOTAL = counter("gpu_ecc_errors_total",
    "Errors of the GPU's memory since the driver was loaded: corrected ones cost nothing, uncorrected ones end the "
    "job.", (*GPU, "error"), "NVML fields 3 (corrected) and 4 (uncorrected)", key=True)
GPU_ECC_LIFETIME_ERRORS_TOTAL = counter("gpu_ecc_lifetime_errors_total", "Errors of the GPU's memory over the life of "
    "the board: corrected, uncorrected.", (*GPU, "error"), "NVML fields 5 (corrected) and 6 (uncorrected)")
GPU_ECC_LOCATION_ERRORS_TOTAL = counter("gpu_ecc_location_errors_total",
    "Memory errors since the driver was loaded, by location: l1, l2, dram, register, texture, shared, cbu, sram. "
    "Absent for locations without an error.", (*GPU, "error", "location"), "nvmlDeviceGetMemoryErrorCounter")
GPU_SRAM_ERROR_THRESHOLD_EXCEEDED = gauge("gpu_sram_error_threshold_exceeded", "1 if uncorrectable SRAM errors exceed "
    "the board's threshold: replace the board.", GPU, "nvmlDeviceGetSramEccErrorStatus bThresholdExceeded (root)")
GPU_REMAPPED_ROWS_TOTAL = sparse(counter("gpu_remapped_rows_total", "Memory rows remapped to spare rows over the life "
    "of the board, by cause.", (*GPU, "error"), "NVML fields 142, 143, nvmlDeviceGetRemappedRows"))
GPU_ROW_REMAP_PENDING = gauge("gpu_row_remap_pending", "1 if rows wait to be remapped at the next reset.", GPU,
    "NVML field 144, nvmlDeviceGetRemappedRows")
GPU_ROW_REMAP_FAILURE = gauge("gpu_row_remap_failure", "1 if a row could not be remapped: replace the board.", GPU,
    "NVML field 145, nvmlDeviceGetRemappedRows")
GPU_ROW_REMAP_BANKS = gauge("gpu_row_remap_banks",
    "Memory banks by spare rows left: max, high, partial, low, none. Absent, except for max, until a bank is in that "
    "state.", (*GPU, "availability"), "nvmlDeviceGetRowRemapperHistogram")
GPU_REMAPPED_ROWS_INACTIVE = gauge("gpu_remapped_rows_inactive", "Remapped memory rows that are not in use, by error. "
    "Absent until one is.", (*GPU, "error"), "NVML fields 301 (corrected) and 302 (uncorrected)")
GPU_BANK_REMAPPINGS = gauge("gpu_bank_remappings", "Memory banks replaced by spare banks, by state: active, inactive, "
    "pending (1 if one waits for a reset). Absent before Blackwell.", (*GPU, "state"), "NVML fields 303, 304 and 307")
GPU_BANK_REMAP_GROUPS = gauge("gpu_bank_remap_groups", "Groups of memory banks by spare banks left: max, none. Absent "
    "before Blackwell.", (*GPU, "availability"), "NVML fields 305 and 306")
GPU_MEMORY_UNREPAIRABLE = gauge("gpu_memory_unrepairable", "1 if the GPU has memory that cannot be repaired: replace "
    "it. Absent before R590.", GPU, "nvmlDeviceGetUnrepairableMemoryFlag_v1")
GPU_C2C_LINKS = gauge("gpu_c2c_links", "NVLink-C2C links to the CPU by state: active, inactive. Only on Grace.",
    (*GPU, "state"), "NVML fields 170 and 171")
GPU_C2C_SPEED_BYTES_PER_SECOND = gauge("gpu_c2c_speed_bytes_per_second", "Speed of the slowest active NVLink-C2C link. "
    "Only on Grace.", GPU, "NVML field 172, MB/s", scale=1e6)
GPU_C2C_ERRORS_TOTAL = counter("gpu_c2c_errors_total", "Errors of the NVLink-C2C link that has most: crc, replay, "
    "replay_b2b (back to back). Only on Grace.", (*GPU, "error"), "NVML fields 231, 232 and 233")
GPU_RETIRED_PAGES_TOTAL = counter("gpu_retired_pages_total", "Memory pages retired over the life of the board (before "
    "Ampere).", (*GPU, "error"), "NVML fields 29 (corrected) and 30 (uncorrected)")
GPU_RETIRED_PAGES_PENDING = gauge("gpu_retired_pages_pending", "1 if pages wait to be retired at the next reset.", GPU,
    "NVML field 31")
GPU_REPAIR_PENDING = gauge("gpu_repair_pending", "1 if a repair waits for the next reset: channel, tpc (Hopper and "
    "later).", (*GPU, "part"), "nvmlDeviceGetRepairStatus")
# PCIe.
GPU_PCIE_GENERATION = gauge("gpu_pcie_generation", "Current PCIe generation of the link. Falls while the GPU idles, by "
    "design.", GPU, "nvmlDeviceGetCurrPcieLinkGeneration")
GPU_PCIE_GENERATION_MAX = gauge("gpu_pcie_generation_max", "Highest PCIe generation that GPU and slot support.", GPU,
    "nvmlDeviceGetMaxPcieLinkGeneration")
GPU_PCIE_WIDTH_LANES = gauge("gpu_pcie_width_lanes", "PCIe lanes in use.", GPU, "nvmlDeviceGetCurrPcieLinkWidth")
GPU_PCIE_WIDTH_MAX_LANES = gauge("gpu_pcie_width_max_lanes", "Highest number of PCIe lanes that GPU and slot support.",
    GPU, "nvmlDeviceGetMaxPcieLinkWidth")
GPU_PCIE_REPLAYS_TOTAL = counter("gpu_pcie_replays_total", "PCIe packets retransmitted.", GPU, "NVML field 94")
GPU_PCIE_ERRORS_TOTAL = sparse(counter("gpu_pcie_errors_total", "PCIe errors by kind. With --series full, correctable, "
    "non_fatal and fatal start at 0, and others are absent until they occur.", (*GPU, "error"),
    "NVML fields 95, 169, 173-183"))
GPU_PCIE_TRANSMIT_BYTES_TOTAL = counter("gpu_pcie_transmit_bytes_total", "Bytes sent by the GPU over PCIe.", GPU,
    "GPM metric 20, DCGM field 1009")
GPU_PCIE_RECEIVE_BYTES_TOTAL = counter("gpu_pcie_receive_bytes_total", "Bytes received by the GPU over PCIe.", GPU,
    "GPM metric 21, DCGM field 1010")
# MIG instances.
GPU_MIG_INFO = info("gpu_mig_info", "Identity of one MIG instance of a GPU.",
    (*GPU, "gpu_instance", "compute_instance", "mig_uuid", "profile"),
    "nvmlDeviceGetMigDeviceHandleByIndex, GetGpuInstanceId, GetComputeInstanceId, GetUUID, GetName")
GPU_MIG_MEMORY_USED_BYTES = gauge("gpu_mig_memory_used_bytes", "Device memory allocated in a MIG instance.",
    (*GPU, "gpu_instance"), "nvmlDeviceGetMemoryInfo v2 used")
GPU_MIG_MEMORY_TOTAL_BYTES = gauge("gpu_mig_memory_total_bytes", "Device memory of a MIG instance.",
    (*GPU, "gpu_instance"), "nvmlDeviceGetMemoryInfo v2 total")
GPU_MIG_PROFILED_SECONDS_TOTAL = counter("gpu_mig_profiled_seconds_total", "Time covered by the activity counters of a "
    "MIG instance, such as gpu_mig_sm_active_seconds_total.", (*GPU, "gpu_instance"), "nvmlGpmMigSampleGet interval")
GPU_MIG_SM_ACTIVE_SECONDS_TOTAL = counter("gpu_mig_sm_active_seconds_total",
    "Time in which a streaming multiprocessor of a MIG instance had a resident warp, mean over the instance's "
    "multiprocessors.", (*GPU, "gpu_instance"), "nvmlGpmMigSampleGet, GPM metric 2")
GPU_MIG_TENSOR_ACTIVE_SECONDS_TOTAL = counter("gpu_mig_tensor_active_seconds_total",
    "Time in which a tensor core of a MIG instance issued instructions, mean over the instance's tensor cores.",
    (*GPU, "gpu_instance"), "nvmlGpmMigSampleGet, GPM metric 5")
GPU_MIG_DRAM_ACTIVE_SECONDS_TOTAL = counter("gpu_mig_dram_active_seconds_total",
    "Share of the device memory's bandwidth that a MIG instance used, integrated over time.", (*GPU, "gpu_instance"),
    "nvmlGpmMigSampleGet, GPM metric 10")
# NVLink fabric (multi-GPU and multi-node).
GPU_FABRIC_INFO = info("gpu_fabric_info", "NVLink fabric of the GPU: its cluster, and the clique of GPUs that it can "
    "reach.", (*GPU, "cluster", "clique"), "nvmlDeviceGetGpuFabricInfoV")
GPU_FABRIC_STATE_ID = gauge("gpu_fabric_state_id", "State of the GPU's registration with the fabric manager: 0 not "
    "supported, 1 not started, 2 in progress, 3 completed.", GPU, "nvmlDeviceGetGpuFabricInfoV state")
GPU_FABRIC_STATUS_ID = gauge("gpu_fabric_status_id", "nvmlReturn_t of the GPU's completed registration with the fabric "
    "manager. 0 is success.", GPU, "nvmlDeviceGetGpuFabricInfoV status")
GPU_FABRIC_HEALTH_ID = gauge("gpu_fabric_health_id", "Health of the NVLink fabric at this GPU: 1 healthy, 2 unhealthy, "
    "3 limited capacity.", GPU, "nvmlDeviceGetGpuFabricInfoV v3 healthSummary")
GPU_FABRIC_FAULT = gauge("gpu_fabric_fault",
    "1 while the driver reports this fault of the NVLink fabric: degraded_bandwidth, route_recovery, route_unhealthy, "
    "access_timeout, incorrect_configuration, no_partition, manager_disconnected. Absent until it first occurs after "
    "the exporter's start.", (*GPU, "fault"), "nvmlDeviceGetGpuFabricInfoV healthMask")
# Xid: what the driver reports about a GPU.
GPU_XID_ERRORS_TOTAL = sparse(counter("gpu_xid_errors_total",
    "Xid errors counted by this exporter across its restarts. With --series full, the usual critical codes start at 0. "
    "The code other sums the rarer codes of a GPU with too many different ones. The gpu label of a GPU that never "
    "answered is its PCI address. Meaning: docs/xid.md.", (*GPU, "xid"),
    "/dev/kmsg NVRM lines and NVML events, each counted once; PCI bus id matched to the inventory", key=True))
GPU_XID_LAST_TIMESTAMP_SECONDS = gauge("gpu_xid_last_timestamp_seconds", "Time this Xid was last seen on this GPU, as "
    "Unix time.", (*GPU, "xid"), "/dev/kmsg record time, or when the NVML event came")
GPU_XID_INFO = info("gpu_xid_info",
    "Meaning of an Xid, for the codes seen on this host. With --series core only of critical and fatal ones.",
    ("xid", "name", "class", "severity", "action"), "flopwatch/data/xid.csv, from NVIDIA's Xid catalogue")
GPU_XID_NVLINK_ERRORS_TOTAL = counter("gpu_xid_nvlink_errors_total", "NVLink Xids (74, 144-150) by the fields of their "
    "text: the unit that saw the error, the link (empty if unknown), NVIDIA's immediate action and what to investigate "
    "next.", (*GPU, "xid", "unit", "link", "severity", "action", "investigation"),
    "/dev/kmsg NVRM lines; flopwatch/data/xid_nvlink5.csv")
GPU_XID_RECOVERY_ACTION_ID = gauge("gpu_xid_recovery_action_id", "Action that the GPU's last Xid 154 asked for, in the "
    "numbers of gpu_recovery_action_id. Absent before the first Xid 154.", GPU, "/dev/kmsg NVRM lines")
GPU_INITIALIZATION_FAILED_TIMESTAMP_SECONDS = gauge("gpu_initialization_failed_timestamp_seconds", "Last time the "
    "driver failed to initialize this GPU, as Unix time. Absent before the first failure.", GPU,
    "/dev/kmsg NVRM lines: RmInitAdapter failed")
GPU_DRIVER_EVENTS_TOTAL = counter("gpu_driver_events_total",
    "Driver events without an Xid: unavailable, recovery_action (the recovery action changed).", (*GPU, "event"),
    "nvmlEventSetWait_v2, event types 0x4000 and 0x8000")
# Owners.
GPU_OWNER_INFO = info("gpu_owner_info", "Owner of a GPU or MIG instance. source is kubelet, slurm, job_mapping, "
    "process (a user outside of any job), none or unknown. A shared GPU has one series per owner, at most 8.", (*GPU,
    "host", "mig_uuid", "owner_namespace", "owner_pod", "owner_container", "owner_job", "owner_user", "source"),
    "kubelet PodResources v1, /proc/PID/cgroup of the GPU's processes, dcgm-exporter's job mapping files")
GPU_OWNER_UPDATED_TIMESTAMP_SECONDS = gauge("gpu_owner_updated_timestamp_seconds",
    "Time the GPU's owner was last read from its source, as Unix time.", GPU, "flopwatch.node.collectors.identity")
